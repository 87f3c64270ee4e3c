"""Converts GGUF files of llama.cpp: `python -m convert.gguf SRC OUT`."""

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert.conversion import command, run

main = command("convert.gguf")

if __name__ == "__main__":
    run(main)
