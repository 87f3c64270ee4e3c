"""`python -m failfast_jax.harness`: the harness' own command (`lm_eval`), with the model `failfast_jax`.

This command imports the model, by which versions up to 0.4.13 of the harness find it. Later ones also read the entry
point `lm_eval.models` of packages.
"""

from __future__ import annotations

import argparse
import logging
import sys

from failfast_jax.util import command_line
from failfast_jax.util.compile_cache import enable_compile_cache


def _work(args: argparse.Namespace) -> None:
    main_of_harness = command_line.import_optional("lm_eval.__main__", "the harness", "eval")
    command_line.import_optional("failfast_jax.harness.model", "the harness", "eval")  # registers itself
    enable_compile_cache()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each retry twice
    sys.argv = ["lm_eval", args.subcommand, *args.arguments]
    main_of_harness.cli_evaluate()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    parser = command_line.Parser(
        prog="python -m failfast_jax.harness",
        description=__doc__,
        epilog="For example: run --model failfast_jax --model_args method=lookup,batch=4 --tasks gsm8k --limit 20. "
        "For --model_args see failfast_jax/harness/model.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subcommand", choices=("run", "ls", "validate"), help="of lm_eval")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of lm_eval's subcommand")
    args = parser.parse_args(argv)
    return command_line.run(lambda: _work(args))


if __name__ == "__main__":
    sys.exit(main())
