"""Converts SDAR checkpoints: `python -m convert.sdar SRC OUT`."""

from convert.conversion import command, run

main = command("convert.sdar")

if __name__ == "__main__":
    run(main)
