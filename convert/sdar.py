"""Converts SDAR checkpoints: `python -m convert.sdar SRC OUT`."""

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert.conversion import command, run

main = command("convert.sdar")

if __name__ == "__main__":
    run(main)
