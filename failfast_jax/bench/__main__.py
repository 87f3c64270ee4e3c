"""`python -m failfast_jax.bench COMMAND`: measurements; without a command, `run`."""

from __future__ import annotations

import sys

from failfast_jax.util import command_line

COMMANDS = {
    "run": "compare methods on datasets",
    "paper": "the paper's tables, figures and numbers, from the records of runs",
    "replay": "time rounds at real sizes, with the paper's acceptance",
    "micro": "plain decoding beside the memory's limit and other programs; attention kernels checked and timed",
}
MODULES = {"run": "run_command", "paper": "paper.reproduction"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit status."""
    return command_line.dispatch("failfast_jax.bench", COMMANDS, argv, extra="bench", modules=MODULES)


if __name__ == "__main__":
    sys.exit(main())
