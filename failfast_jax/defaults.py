"""The embedded default pair: SmolLM2-135M-Instruct and the drafter that ships with this package."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints.hub import default_target_path, find_models
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.drafters import DEFAULT_METHOD, check_method
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.options import flag_of

ASSETS = Path(__file__).parent / "assets"

logger = logging.getLogger("failfast_jax")


def embedded_drafter() -> Path | None:
    """Folder of the drafter for the default target in `assets/`, if one ships."""
    return next((path.parent for path in sorted(ASSETS.glob("*/config.json"))), None)


def load_pair(
    target: str | os.PathLike | None = None,
    drafter: str | os.PathLike | None = None,
    *,
    method: str = DEFAULT_METHOD,
    schedule: str | None = None,
    share: FailFast | None = None,
    **options: Any,
) -> FailFast:
    """An engine for `method`, with the embedded models where none are named; loads no drafter it will not use.

    The embedded drafter drafts up to 7 tokens. The schedule `aligned` needs whole blocks and a cache of its own: with
    it the embedded target itself drafts, run block-causally and not trained to.

    Args:
      share: an engine whose target, with its tokenizer, is used instead of reading `target` once more, and whose store
        of compiled programs is shared.
      options: further arguments of `FailFast`.

    Raises:
      ValueError: a model is missing, unreadable or does not fit; the message names it.
    """
    taker = check_method(method)
    kinds = taker.kinds if taker.needs_model or target is None or drafter is not None else ()
    for name in ("quantize_drafter", "rope_theta_drafter"):
        if not kinds and (value := options.get(name)):
            raise OptionError(f"{flag_of(name)} {value}: --method {method} drafts without a model")
    find_models({"--target": target, "--drafter": drafter})
    options["programs"] = None if share is None else share.runtime.programs

    def build(*drafter: Any) -> FailFast:
        if share is None:
            return FailFast(target or default_target_path(), *drafter, **options)
        engine = FailFast(share.target, *drafter, tokenizer=share.tokenizer, **options)
        engine.target_name = share.target_name
        return engine

    if not kinds:
        return build()
    if drafter is not None:
        return build(drafter)
    if target is not None or not {BLOCK_DIFFUSION, FEATURE_BLOCK} & {*kinds}:
        whose = "" if target is None else f" for {target}"
        raise OptionError(f"--method {method}: needs --drafter, a model of kind {' or '.join(kinds)}{whose}")
    shipped = embedded_drafter()
    if shipped is not None and not (method == "failfast" and schedule == "aligned"):
        return build(shipped)
    return _untrained_pair(share, options)


def _untrained_pair(share: FailFast | None, options: dict[str, Any]) -> FailFast:
    """The embedded target with itself as its drafter."""
    if share is not None:
        model, tokenizer = share.target, share.tokenizer
    else:
        model, tokenizer = ModelFolder(default_target_path()).load(options.get("dtype"))
    logger.warning("drafting with SmolLM2 itself, run block-causally: it is not trained to draft")
    untrained = as_untrained_drafter(model)
    return FailFast(model, untrained, tokenizer=tokenizer, drafter_tokenizer=tokenizer, **options)
