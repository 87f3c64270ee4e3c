"""Converts dense Qwen3 checkpoints: `python -m convert.qwen3 SRC OUT`."""

from convert.conversion import command, run

main = command("convert.qwen3")

if __name__ == "__main__":
    run(main)
