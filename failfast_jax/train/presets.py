"""Settings of runs: what a preset says where an option is not given, and what holds otherwise."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from failfast_jax.errors import OptionError
from failfast_jax.train.loop import Optimization

SEQ_LEN, FAMILY = 320, "dspark"
PRESETS: dict[str, dict[str, Any]] = {
    # Objective and packing as in the released code; learning rate and schedule as in a public finetuning script for it,
    # with 3 % of the steps to warm up. 256 rows of 2,048 tokens a step: 1.3 billion tokens.
    "fast-dllm-v2": {
        "family": "diffusion",
        "block_start": "noised",
        "corruption": "uniform",
        "mask_logit": "scored",
        "position_decay": 0.0,
        "packing": "stream",
        "seq_len": 2048,
        "steps": 2500,
        "batch": 32,
        "accumulate": 8,
        "learning_rate": 2e-5,
        "schedule": "constant",
        "warmup": 75,
        "weight_decay": 0.0,
        "beta2": 0.999,
        "ema": 0.0,
    },
}


def fill_in(args: argparse.Namespace) -> None:
    """Gives options that are not given the preset's values, and those that all families have their defaults.

    Raises:
      OptionError: another family than the preset's.
    """
    preset = PRESETS.get(args.preset, {})
    if preset and args.family not in (None, preset["family"]):
        raise OptionError(f"--family {args.family}: --preset {args.preset} is of --family {preset['family']}")
    for name, value in preset.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    defaults = {field.name: field.default for field in dataclasses.fields(Optimization)}
    for name, value in {"family": FAMILY, "seq_len": SEQ_LEN, **defaults}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
