"""Converts Fast-dLLM v2 checkpoints: `python -m convert.fast_dllm SRC OUT`."""

from convert.conversion import command, run

main = command("convert.fast_dllm")

if __name__ == "__main__":
    run(main)
