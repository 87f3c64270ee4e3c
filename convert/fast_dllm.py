"""`python -m convert`, by the name of a family: Fast-dLLM v2 checkpoints."""

from convert.conversion import main, run

if __name__ == "__main__":
    run(main)
