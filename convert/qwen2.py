"""Converts Qwen2, Qwen2.5 and Llama-family checkpoints: `python -m convert.qwen2 SRC OUT`."""

from convert.conversion import command, run

main = command("convert.qwen2")

if __name__ == "__main__":
    run(main)
