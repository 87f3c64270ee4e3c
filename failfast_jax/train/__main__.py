"""`python -m failfast_jax.train`: a drafter for a target, made from the target; `run` where no command is named."""

from __future__ import annotations

import sys

from failfast_jax.util import command_line

COMMANDS = {
    "run": "train a drafter (where no command is named)",
    "selfgen": "training data, which the target writes itself",
    "spiffy": "the draft states that `generate --method dllm --spiffy` runs beside a block",
}
MODULES = {"run": "train_command", "spiffy": "draft_graph_calibration"}
"""Modules of commands with another name."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; exit status 2 for input that cannot be served, 3 if `--minutes` ended it."""
    return command_line.dispatch("failfast_jax.train", COMMANDS, argv, extra="train", modules=MODULES)


if __name__ == "__main__":
    sys.exit(main())
