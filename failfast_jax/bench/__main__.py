"""`python -m failfast_jax.bench COMMAND`: measurements; without a command, `run`."""

from __future__ import annotations

import functools
import sys

from failfast_jax.util import command_line

COMMANDS = {
    "run": ("run_command", "compare methods on datasets"),
    "paper": ("paper.reproduction", "the paper's tables, figures and numbers, from the records of runs"),
    "replay": ("replay", "time rounds at real sizes, with the paper's acceptance"),
    "micro": ("micro", "plain decoding beside the memory's limit and peers; attention kernels checked and timed"),
}
main = functools.partial(command_line.dispatch, "failfast_jax.bench", COMMANDS, "bench")

if __name__ == "__main__":
    sys.exit(main())
