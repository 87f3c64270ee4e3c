"""The embedded default pair, and the choice of the drafter that a method needs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints.hub import default_target_path, find_models
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.drafters import DEFAULT_METHOD, check_method
from failfast_jax.errors import OptionError
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.models.transformer import as_untrained_drafter
from failfast_jax.options import flag_of

logger = logging.getLogger("failfast_jax")

ASSETS = Path(__file__).parent / "assets"
UNTRAINED = object()
"""Stands for the default target, run block-causally, as its own drafter."""


def embedded_drafter() -> Path | None:
    """Folder of the drafter in `assets/` for the default target, if it ships."""
    return next((path.parent for path in sorted(ASSETS.glob("*/config.json"))), None)


def drafter_for(drafter: Any, options: LoadOptions, target: Any) -> Any:
    """The drafter to load with a target: a model or its source, None, or `UNTRAINED`.

    The embedded drafter drafts up to 7 tokens. The schedule `aligned` needs whole blocks and a cache of its own: with
    it the default target itself drafts, untrained.

    Args:
      drafter: the user's choice; None: that of the default pair, if the target is the default one.
      options: their `method` and `schedule` decide whether a drafter is needed, and which.
      target: the user's choice, a model or its source; None: the default one.

    Raises:
      OptionError: the method needs a drafter, and none is named; or an option of the drafter, and none is loaded.
    """
    method = options.method or DEFAULT_METHOD
    taker = check_method(method)
    if not taker.kinds or (drafter is None and target is not None and not taker.needs_model):
        for name in ("quantize_drafter", "rope_theta_drafter"):
            if (value := getattr(options, name)) is not None:
                reason = "there is no drafter" if taker.kinds else f"--method {method} drafts without a model"
                raise OptionError(f"{flag_of(name)} {value}: {reason}")
        return None
    if drafter is not None:
        return drafter
    if target is not None or not {BLOCK_DIFFUSION, FEATURE_BLOCK} & {*taker.kinds}:
        needed = f"needs --drafter, a model of kind {' or '.join(taker.kinds)}"
        place = f" for {target}" if isinstance(target, (str, os.PathLike)) else ""
        raise OptionError(f"--method {method}: {needed}{place}")
    if method == "failfast" and options.schedule == "aligned":
        return UNTRAINED
    return embedded_drafter() or UNTRAINED


def found_models(target: Any, drafter: Any, options: LoadOptions) -> tuple[Any, Any, LoadOptions]:
    """Finds both models, downloading them where needed, before the first one is read.

    Args:
      target: a model or its source; None: the default target.
      drafter: see `drafter_for`.

    Returns:
      Models or their sources, with the options to read them by.

    Raises:
      CheckpointError: a model is missing; the message names its flag.
    """
    sources = {"--target": target, "--drafter": drafter}
    find_models({flag: source for flag, source in sources.items() if isinstance(source, (str, os.PathLike))})
    target = default_target_path() if target is None else target
    if drafter is not UNTRAINED:
        return target, drafter, options
    logger.warning("drafting with SmolLM2 itself, run block-causally: it is not trained to draft")
    tokenizer = options.tokenizer
    if isinstance(target, os.PathLike):
        target, tokenizer = ModelFolder(target).load(options.dtype)
    options = options.changed(tokenizer=tokenizer, drafter_tokenizer=tokenizer)
    return target, as_untrained_drafter(target), options
