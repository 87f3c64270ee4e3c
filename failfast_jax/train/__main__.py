"""`python -m failfast_jax.train`: a drafter for a target, made from the target; `run` where no command is named."""

from __future__ import annotations

import functools
import sys

from failfast_jax.util import command_line

COMMANDS = {
    "run": ("train_command", "train a drafter (where no command is named)"),
    "selfgen": ("selfgen", "training data, which the target writes itself"),
    "spiffy": ("draft_graph_calibration", "draft states that `generate --method dllm --spiffy` runs beside a block"),
}
main = functools.partial(command_line.dispatch, "failfast_jax.train", COMMANDS, "train")

if __name__ == "__main__":
    sys.exit(main())
