"""Converts dense Qwen3 checkpoints: `python -m convert.qwen3 SRC OUT`."""

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert.conversion import command, run

main = command("convert.qwen3")

if __name__ == "__main__":
    run(main)
