"""`python -m convert`, by the name of a family: Qwen2, Qwen2.5 and Llama-family checkpoints."""

from convert.conversion import main, run

if __name__ == "__main__":
    run(main)
