"""`python -m failfast_jax.harness`: the harness' own command (`lm_eval`), with the model `failfast_jax`.

The harness finds models by import, and has no place where packages announce theirs: so this command imports it.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from failfast_jax import command
from failfast_jax.errors import OptionError


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.harness",
        description=__doc__,
        epilog="For example: run --model failfast_jax --model_args method=lookup,batch=4 --tasks gsm8k --limit 20. "
        "What --model_args takes: see failfast_jax/harness/model.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subcommand", choices=("run", "ls", "validate"), help="of lm_eval")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of lm_eval's subcommand")
    return parser


def _work(args: argparse.Namespace) -> None:
    try:
        main_of_harness = importlib.import_module("lm_eval.__main__")
        importlib.import_module("failfast_jax.harness.model")  # registers itself
    except ImportError as error:
        said = 'pip install "failfast-jax[eval]", or -e ".[eval]" in a checkout'
        raise OptionError(f"the harness needs {error.name or 'lm_eval'}: {said}") from None
    sys.argv = ["lm_eval", args.subcommand, *args.arguments]
    main_of_harness.cli_evaluate()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    return command.run(lambda: _work(args))


if __name__ == "__main__":
    sys.exit(main())
