"""Converts Qwen2, Qwen2.5 and Llama-family checkpoints: `python -m convert.qwen2 SRC OUT`."""

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert.conversion import command, run

main = command("convert.qwen2")

if __name__ == "__main__":
    run(main)
