"""Converts every kind of checkpoint that is read: `python -m convert SRC OUT`."""

from convert.conversion import command, run

main = command("convert")

if __name__ == "__main__":
    run(main)
