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


def embedded_drafter() -> Path | None:
    """Folder of the drafter in `assets/` for the default target, if it ships."""
    return next((path.parent for path in sorted(ASSETS.glob("*/config.json"))), None)


def found_models(
    target: Any, drafter: Any, options: LoadOptions, has_default_target: bool
) -> tuple[Any, Any, LoadOptions]:
    """Chooses the drafter that a method needs, and finds both models, downloading them where needed, before the first
    one is read.

    The embedded drafter drafts up to 7 tokens. `fast-dllm`, `specdiff` and the schedule `aligned` need whole blocks and
    a cache of their own: with them the default target itself drafts, untrained.

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
    is_untrained = False
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
        drafter = embedded_drafter() if FEATURE_BLOCK in taker.kinds else None
        is_untrained = drafter is None or (method == "failfast" and options.schedule == "aligned")
    sources = {"--target": target, "--drafter": drafter}
    find_models({flag: source for flag, source in sources.items() if isinstance(source, (str, os.PathLike))})
    target = default_target_path() if target is None else target
    if not is_untrained:
        return target, drafter, options
    logger.warning("drafting with SmolLM2 itself, run block-causally: it is not trained to draft")
    tokenizer = options.tokenizer
    if isinstance(target, os.PathLike):
        target, tokenizer = ModelFolder(target).load(options.dtype)
    options = options.changed(tokenizer=tokenizer, drafter_tokenizer=tokenizer)
    return target, as_untrained_drafter(target), options
