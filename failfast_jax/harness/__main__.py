"""`python -m failfast_jax.harness`: the harness' own command (`lm_eval`), with the model `failfast_jax`.

This command imports the model, by which versions up to 0.4.13 of the harness find it. Later ones also read the entry
point `lm_eval.models` of packages.
"""

from __future__ import annotations

import argparse
import logging
import sys

from failfast_jax.util import command_line, processes
from failfast_jax.util.compile_cache import enable_compile_cache

PROGRAM = "python -m failfast_jax.harness"


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command_line.PlainParser(
        prog=PROGRAM,
        description=__doc__,
        epilog="For example: run --model failfast_jax --model_args method=lookup,batch=4 --tasks gsm8k --limit 20. "
        "For --model_args see failfast_jax/harness/model.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    processes.add_flag(parser)
    parser.add_argument("subcommand", choices=("run", "ls", "validate"), help="of lm_eval")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of lm_eval's subcommand")
    return parser


def _work(args: argparse.Namespace) -> None:
    main_of_harness = command_line.import_optional("lm_eval.__main__", "the harness", "eval")
    model = command_line.import_optional("failfast_jax.harness.model", "the harness", "eval")  # registers itself
    enable_compile_cache()
    if not processes.is_primary():
        model.follow()
        return
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each retry twice
    sys.argv = ["lm_eval", args.subcommand, *args.arguments]
    try:
        main_of_harness.cli_evaluate()
    finally:
        model.tell(None)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    parser = build_parser()
    # Our flags are taken from any place; the rest is left to lm_eval as it is.
    ours = command_line.PlainParser(prog=PROGRAM, add_help=False)
    processes.add_flag(ours)
    known, others = ours.parse_known_args(argv)
    args = parser.parse_args(others)
    return command_line.run(lambda: _work(args), where=known.distributed)


if __name__ == "__main__":
    sys.exit(main())
