"""`python -m failfast_jax.train`: a drafter for a target, made from the target; `run` where no command is named."""

from __future__ import annotations

import argparse
import importlib
import sys

from failfast_jax import command
from failfast_jax.train.resume import UNFINISHED, OutOfTime

COMMANDS = {
    "run": "train a drafter (where no command is named)",
    "selfgen": "training data, which the target writes itself",
    "recipe": "all steps, from data to a drafter with the options that are fastest here",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command; exit status 2 for input that cannot be served, 3 if `--minutes` ended it."""
    argv = sys.argv[1:] if argv is None else argv
    name, flags = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    try:
        module = importlib.import_module(f"failfast_jax.train.{name}")
    except ModuleNotFoundError as error:
        sys.exit(
            f'error: training needs {error.name}: pip install "failfast-jax[train]", or -e ".[train]" in a checkout'
        )
    parser = argparse.ArgumentParser(
        prog=f"python -m failfast_jax.train {name}",
        description=module.__doc__.split("\n\n")[0].split(": ", 1)[1],
        epilog="Commands: " + "; ".join(f"{other}: {what}" for other, what in COMMANDS.items()) + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(flags)

    def work() -> int | None:
        try:
            return module.work(args)
        except OutOfTime:
            print(f"{name}: stopped by --minutes; the same command goes on", file=sys.stderr)
            return UNFINISHED

    return command.run(work, interrupted="interrupted; the same command goes on from what is saved")


if __name__ == "__main__":
    sys.exit(main())
