"""The embedded default pair: SmolLM2-135M-Instruct and the drafter that ships with this package."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.pair import load_with_tokenizer
from failfast_jax.checkpoints.tuned import read_settings
from failfast_jax.drafters import check_method
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.models import quantization
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION

ASSETS = Path(__file__).parent / "assets"

logger = logging.getLogger("failfast_jax")


def embedded_drafter() -> Path | None:
    """Folder of the drafter for the default target in `assets/`, if one ships."""
    return next((path.parent for path in sorted(ASSETS.glob("*/config.json"))), None)


def load_pair(
    target: str | os.PathLike | None = None,
    drafter: str | os.PathLike | None = None,
    *,
    method: str,
    schedule: str | None = None,
    dtype: Any = None,
    max_seq_len: int | None = None,
    compile_cache: str | os.PathLike | None = None,
    tensor_parallel: int = 1,
    attention: str | None = None,
    quantize: str | None = None,
    quantize_drafter: str | None = None,
    share: FailFast | None = None,
    settings: str | os.PathLike | None = None,
) -> FailFast:
    """An engine for `method`, with the embedded models where none are named; loads no drafter it will not use.

    The embedded drafter drafts up to 7 tokens. The schedule `aligned` needs whole blocks and a cache of its own: with
    it the embedded target itself drafts, run block-causally and not trained to.

    Args:
      share: an engine whose target, with its tokenizer, is used instead of reading `target` once more, and whose store
        of compiled programs is shared.
      settings: a settings file; where `schedule` is None, its schedule counts.

    Raises:
      ValueError: a model is missing, unreadable or does not fit; the message names it.
    """
    kinds = _kinds_of(method, settings, quantize, quantize_drafter)
    if settings is not None:
        schedule = schedule or read_settings(settings).decoding.get("schedule")
    options = {
        "dtype": dtype,
        "max_seq_len": max_seq_len,
        "compile_cache": compile_cache,
        "tensor_parallel": tensor_parallel,
        "attention": attention,
        "quantize": quantize,
        "quantize_drafter": quantize_drafter,
        "settings": settings,
        "programs": None if share is None else share.runtime.programs,
    }

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
    if target is not None or BLOCK_DIFFUSION not in kinds:
        whose = "" if target is None else f" for {target}"
        raise OptionError(f"--method {method}: needs --drafter, a model of kind {' or '.join(kinds)}{whose}")
    shipped = embedded_drafter()
    if shipped is not None and not (method == "failfast" and schedule == "aligned"):
        return build(shipped)
    if share is not None:
        model, tokenizer = share.target, share.tokenizer
    else:
        model, tokenizer = load_with_tokenizer(default_target_path(), dtype)
    logger.warning("drafting with SmolLM2 itself, run block-causally: it is not trained to draft")
    untrained = as_untrained_drafter(model)
    return FailFast(model, untrained, tokenizer=tokenizer, drafter_tokenizer=tokenizer, **options)


def _kinds_of(
    method: str, settings: str | os.PathLike | None, quantize: str | None, quantize_drafter: str | None
) -> tuple[str, ...]:
    """Kinds of drafter models that a method takes; what can be refused before anything is read is."""
    if settings is not None and method != "failfast":
        raise OptionError(f"--settings {settings}: only --method failfast takes tuned settings, not {method}")
    quantization.check(quantize)
    quantization.check(quantize_drafter, "--quantize-drafter")
    kinds = check_method(method).kinds
    if not kinds and quantize_drafter is not None:
        raise OptionError(f"--quantize-drafter {quantize_drafter}: --method {method} drafts without a model")
    return kinds
