"""Converts every kind of checkpoint that is read: `python -m convert SRC OUT`."""

from convert.conversion import main, run

if __name__ == "__main__":
    run(main)
