"""Converts every kind of checkpoint that is read: `python -m convert SRC OUT`."""

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert.conversion import command, run

main = command("convert")

if __name__ == "__main__":
    run(main)
