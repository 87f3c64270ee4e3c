"""Widths that may serve under `exact`: those whose rows have the same bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Widths
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import numerics

logger = logging.getLogger("failfast_jax")

REFERENCE_WIDTH = 64
LONGEST_CACHE = 4096
"""Positions of the cache that the check runs in, at both ends: at most so many, and the model's context."""
XLA_SUMS = ("stablehlo.dot_general", "stablehlo.reduce(")
"""Operations whose order of summation XLA chooses by the shape: the bits of a row may follow the number of rows, for
some values or on some machine, even where those that were tried agree."""


@numerics.defaults()
def interchangeable_widths(model: Decoder, widths: tuple[int, ...], *, batch: int = 1) -> set[int]:
    """Returns the widths whose rows are bit-identical to those of passes of `REFERENCE_WIDTH` rows.

    Two things must hold of the pass of a width, from embedding to logits. All its sums are those of the CPU's kernels,
    each of which adds up a row in an order of its own (beyond `cpu_kernels.MAX_WIDTH` rows, and on machines without
    these kernels, some are XLA's). And its logits, keys and values have the reference's bits where it is run: the
    first layer and the head, over random tokens at both ends of a cache.

    Example, for widths 8 and 72: the reference runs rows 0..63 and 64..127; 8 runs rows 0..7 and 120..127, 72 runs rows
    0..71 and 56..127, over the reference's cache.
    """
    # Cut after its first layer the model has every matrix shape of the whole one, in a fraction of its time. Forms of
    # quantised matrices may differ by layer; their sums are of whole numbers, or in one order, in each.
    shallow = copy.copy(model)
    shallow.layers = nnx.List([model.layer(0)])
    shallow.config = dataclasses.replace(model.config, num_layers=1)

    @jax.jit
    def window(model: Decoder, cache: KVCache, tokens: Array, start: Array) -> tuple[Array, KVCache]:
        hidden, cache, _ = model.window(tokens, cache, start, start[0] + tokens.shape[1])
        return model.logits_of(hidden), cache

    context = min(model.config.max_position_embeddings, LONGEST_CACHE) // REFERENCE_WIDTH * REFERENCE_WIDTH
    capacity = max(context, round_up(max(widths), REFERENCE_WIDTH))
    cache = jax.jit(functools.partial(shallow.init_cache, batch, capacity))()
    runs = {}
    for width in {REFERENCE_WIDTH, *widths}:
        lowered = window.lower(shallow, cache, np.zeros((batch, width), np.int32), np.zeros(batch, np.int32))
        if not any(operation in lowered.as_text() for operation in XLA_SUMS):
            runs[width] = lowered.compile()
    if REFERENCE_WIDTH not in runs:
        return set()
    length = round_up(max(runs), REFERENCE_WIDTH)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, length)).astype(np.int32)

    def run(width: int, begin: int, place: int, cache: KVCache) -> tuple[np.ndarray, KVCache]:
        """Runs the tokens from `begin` on, of a text that stands at `place`."""
        part = tokens[:, begin : begin + width]
        logits, cache = runs[width](shallow, cache, part, np.full(batch, place + begin, np.int32))
        return np.asarray(whole(logits)), cache

    expected = {0: [], cache.capacity - length: []}
    for place, parts in expected.items():
        for begin in range(0, length, REFERENCE_WIDTH):
            logits, cache = run(REFERENCE_WIDTH, begin, place, cache)
            parts.append(logits)
    expected = {place: np.concatenate(parts, axis=1) for place, parts in expected.items()}

    def agrees(width: int, place: int, begin: int) -> bool:
        logits, written = run(width, begin, place, cache)
        reference = expected[place][:, begin : begin + width]
        pairs = zip((*written.k, *written.v), (*cache.k, *cache.v))
        return _same_bits(logits, reference) and all(_same_bits(whole(a), whole(b)) for a, b in pairs)

    cases = {width: itertools.product(expected, {0, length - width}) for width in widths if width in runs}
    return {width for width, places in cases.items() if all(agrees(width, *case) for case in places)}


def _same_bits(a: np.ndarray | Array, b: np.ndarray | Array) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


class WidthCheck:
    """The widths that may serve a target under `exact`; each is checked once per batch size."""

    def __init__(self, target: Decoder, widths: Widths):
        self.target, self._widths = target, widths
        self._checked: dict[int, dict[int, bool]] = {}

    def widths(self, drafter: Drafter, batch: int) -> tuple[int, ...]:
        """Returns the widths that `make_plan` may choose from for a drafter; none: the constant width has to serve.

        On CPU those that the kernels serve give bit-identical rows. Those that do not are left out.
        """
        constant, prefill = self._widths.exact, {*self._widths.prefill}
        # The whole ladder, and the constant width: another drafter may need them, and a later check starts anew.
        candidates = {*self._widths.verify, *self._widths.ladder(drafter.max_draft + 1), *prefill, constant}
        checked = self._checked.setdefault(batch, {})
        if unchecked := tuple(sorted(candidates - checked.keys())):
            identical = interchangeable_widths(self.target, unchecked, batch=batch)
            checked |= {width: width in identical for width in unchecked}
        widths = {width for width in candidates if checked[width]}
        if constant in widths and max(widths) > drafter.max_draft and widths & prefill:
            return tuple(sorted(widths))
        logger.warning("exact: rows differ between widths here; every step runs at %d rows", constant)
        return ()
