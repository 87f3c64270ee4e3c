"""Converts GGUF files of llama.cpp: `python -m convert.gguf SRC OUT`."""

from convert.conversion import command, run

main = command("convert.gguf")

if __name__ == "__main__":
    run(main)
