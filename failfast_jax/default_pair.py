"""The embedded default pair, and the choice of the drafter that a method needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints.hub import default_target_path, embedded, find_models
from failfast_jax.drafters import DEFAULT_METHOD, check_method
from failfast_jax.errors import CheckpointError, OptionError
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.options import flag_of

DEFAULT_DRAFTER, DIFFUSION_DRAFTER = "smollm2-135m-instruct", "smollm2-diffusion"
"""Embedded drafters of the default target: two layers that read its features, and eight that are block diffusion."""


def embedded_drafter() -> Path | None:
    """Folder of the drafter of the default pair, if it ships."""
    return embedded(DEFAULT_DRAFTER)


def found_models(
    target: Any, drafter: Any, options: LoadOptions, has_default_target: bool
) -> tuple[Any, Any, LoadOptions]:
    """Chooses the drafter that a method needs, and finds both models, downloading them where needed, before the first
    one is read.

    The default drafter drafts up to 7 tokens. `fast-dllm`, `specdiff` and the schedule `aligned` need whole blocks and
    a cache of their own: with them `DIFFUSION_DRAFTER` drafts.

    Args:
      target: a model or its source; None: the default target.
      drafter: the user's choice, a model or its source; None: that of the default pair, if the target is the default
        one.
      options: their `method` and `schedule` decide whether a drafter is needed, and which.

    Returns:
      Models or their sources, with the options to read them by.

    Raises:
      OptionError: the method needs a drafter, and none is named; or an option of the drafter, and none is loaded.
      CheckpointError: a model is missing; the message names its flag.
    """
    method = options.method or DEFAULT_METHOD
    taker = check_method(method)
    if not taker.kinds or (drafter is None and not has_default_target and not taker.needs_model):
        for name in ("quantize_drafter", "rope_theta_drafter"):
            if (value := getattr(options, name)) is not None:
                reason = "there is no drafter" if taker.kinds else f"--method {method} drafts without a model"
                raise OptionError(f"{flag_of(name)} {value}: {reason}")
        drafter = None
    elif drafter is None:
        if not has_default_target or not {BLOCK_DIFFUSION, FEATURE_BLOCK} & {*taker.kinds}:
            needed = f"needs --drafter, a model of kind {' or '.join(taker.kinds)}"
            place = f" for {target}" if isinstance(target, (str, os.PathLike)) else ""
            raise OptionError(f"--method {method}: {needed}{place}")
        is_aligned = method == "failfast" and options.schedule == "aligned"
        name = DEFAULT_DRAFTER if FEATURE_BLOCK in taker.kinds and not is_aligned else DIFFUSION_DRAFTER
        if (drafter := embedded(name)) is None:
            raise CheckpointError(f"the drafter {name} is not in this installation: install the package again")
    sources = {"--target": target, "--drafter": drafter}
    find_models({flag: source for flag, source in sources.items() if isinstance(source, (str, os.PathLike))})
    target = default_target_path() if target is None else target
    return target, drafter, options
