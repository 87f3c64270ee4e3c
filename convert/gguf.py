"""`python -m convert`, by the name of a family: GGUF files of llama.cpp."""

from convert.conversion import main, run

if __name__ == "__main__":
    run(main)
