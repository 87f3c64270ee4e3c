"""`python -m convert`, by the name of a family: SDAR checkpoints."""

from convert.conversion import main, run

if __name__ == "__main__":
    run(main)
