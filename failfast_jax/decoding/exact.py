"""Does a row of a pass depend on the pass's width? Decides which widths may serve under `exact`."""

from __future__ import annotations

import copy
import dataclasses
import logging

import jax
import numpy as np
from flax import nnx

from failfast_jax.decoding import plan as plans
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.cache import round_up
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder

logger = logging.getLogger("failfast_jax")


def first_layer_of(model: Decoder) -> Decoder:
    """The model cut after its first layer: every matrix shape of the whole one, in a fraction of its time."""
    shallow = copy.copy(model)
    shallow.layers = nnx.List([model.layers[0]])
    shallow.config = dataclasses.replace(model.config, num_layers=1)
    return shallow


REFERENCE_WIDTH = 64


def interchangeable_widths(model: Decoder, widths: tuple[int, ...], *, batch: int = 1, seed: int = 0) -> set[int]:
    """The widths whose rows are bit-identical to those of passes of `REFERENCE_WIDTH` rows.

    Runs the model's first layer and its head over random tokens, at several places of a window that the
    reference covers in several passes, and compares logits, keys and values. (On CPU XLA serves windows that are
    wider than those of `kernels.cpu_product`, and the rows of its products depend on how many there are.)
    """
    shallow = first_layer_of(model)
    length = round_up(max(widths), REFERENCE_WIDTH)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (batch, length)).astype(np.int32)

    @jax.jit
    def run(model, cache, tokens, start):
        hidden, cache, _ = model.window(tokens, cache, start, start[0] + tokens.shape[1])
        return model.logits_of(hidden), cache

    def here(value) -> np.ndarray:
        return np.asarray(whole(value))

    def equal(a, b) -> bool:
        return np.array_equal(a.view(np.uint8), b.view(np.uint8))

    cache = jax.jit(lambda: shallow.init_cache(batch, length))()
    parts = []
    for start in range(0, length, REFERENCE_WIDTH):
        part = tokens[:, start : start + REFERENCE_WIDTH]
        logits, cache = run(shallow, cache, part, np.full(batch, start, np.int32))
        parts.append(here(logits))
    expected = np.concatenate(parts, axis=1)

    def agrees(width: int) -> bool:
        for start in sorted({0, (length - width) // 2, length - width}):
            part = tokens[:, start : start + width]
            logits, written = run(shallow, cache, part, np.full(batch, start, np.int32))
            pairs = zip((*written.k, *written.v), (*cache.k, *cache.v))
            same = equal(here(logits), expected[:, start : start + width].copy())
            if not (same and all(equal(here(a), here(b)) for a, b in pairs)):
                return False
        return True

    return {width for width in widths if agrees(width)}


class WidthCheck:
    """Which widths may serve a target under `exact`, found out once for each width and batch size."""

    def __init__(self, target: Decoder):
        self.target = target
        self._checked: dict[int, dict[int, bool]] = {}

    def widths(self, drafter: Drafter, batch: int) -> tuple[int, ...]:
        """The widths that `make_plan` may choose from for a drafter; none: the constant width has to serve.

        On CPU those that `kernels.cpu_product` serves give bit-identical rows. Those that do not are left out.
        """
        # The constant width is one of them: another method may have to fall back to it.
        ladder = plans.cpu_ladder(drafter.max_draft + 1)
        candidates = {*ladder, *plans.CPU_PREFILL_WIDTHS, plans.EXACT_WIDTH}
        checked = self._checked.setdefault(batch, {})
        unchecked = tuple(sorted(candidates - checked.keys()))
        if unchecked:
            fine = interchangeable_widths(self.target, unchecked, batch=batch)
            checked |= {width: width in fine for width in unchecked}
        widths = tuple(sorted(width for width in candidates if checked[width]))
        if (
            checked[plans.EXACT_WIDTH]
            and max(widths) > drafter.max_draft
            and set(widths) & set(plans.CPU_PREFILL_WIDTHS)
        ):
            return widths
        logger.warning("exact: rows differ between widths here; every step runs at %d rows", plans.EXACT_WIDTH)
        return ()
