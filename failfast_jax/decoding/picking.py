"""The target's own token at each position, and which drafted tokens agree with it: pure functions.

Two rules accept drafts. By the first (`pick`) the target picks a token at every position, and a drafted token is kept
if it is the same. By the second (`pick_or_reject`) a drafted token that was sampled from `q` is kept with probability
`min(1, p / q)`. Both give text of the target's distribution; the first also gives the same text whatever was drafted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt

from failfast_jax.decoding.decode_state import Logprobs, Sampling
from failfast_jax.kernels.row_operations import first_largest
from failfast_jax.models.sharding import ONE_DEVICE, Execution, constrain_rows
from failfast_jax.util import numerics

DRAFTING, ACCEPTING, RESAMPLING = 1, 2, 3
"""Streams of a position's randomness that the second rule uses; the target's own picks have the key itself."""


def argmax(logits: Float[Array, "*R V"], confidence: bool = False, execution: Execution = ONE_DEVICE) -> Any:
    """Returns the index of the largest logit, the lowest one on ties; the last one where a logit is NaN.

    Args:
      confidence: static: return a pair, with the index's softmax probability (no other one is stored); NaN where it is
        not finite.
      execution: that of the model whose logits they are, outside a `shard_map`.
    """
    # V, which is no token, where a logit is NaN: for the target's own picks, whose round ends the sequence there.
    best = jnp.minimum(first_largest(logits, execution.mesh is not None), logits.shape[-1] - 1)
    return (best, 1.0 / jnp.sum(jnp.exp(logits - logits.max(-1, keepdims=True)), -1)) if confidence else best


def forbid(logits: Float[Array, "*R V"], mask_token: int | None, vocab: int) -> Float[Array, "*R V"]:
    """Sets the mask token's logit, and those of ids that the target lacks (`>= vocab`), to -inf."""
    ids = jnp.arange(logits.shape[-1])
    return jnp.where((ids < vocab) & (ids != (-1 if mask_token is None else mask_token)), logits, -jnp.inf)


def _largest(value_bits: int, holds: Callable, shape: tuple[int, ...]) -> UInt[Array, "*R"]:
    """Largest unsigned integer of `value_bits` bits for which the monotone predicate `holds`, bit by bit."""

    def body(index, value):
        candidate = value | (jnp.uint32(1) << (value_bits - 1 - index).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, value)

    return jax.lax.fori_loop(0, value_bits, body, jnp.zeros(shape, jnp.uint32))


def filtered_logits(logits: Float[Array, "B W V"], sampling: Sampling) -> Float[Array, "B W V"]:
    """Logits of each sequence's tempered distribution, -inf outside top-k and then top-p (Hugging Face's order).

    Thresholds are found by bisection over the floats' bit patterns, not by a sort: exact, except that all tokens tied
    with the last kept one are kept. Where a single token is enough (top_k 1, or a small top_p) it is the first of the
    best, as in greedy decoding. Only filters that some row asks for are computed. Example: probabilities .5 .3 .2 with
    top_p 0.7 keep two tokens: the threshold is .3, the largest at which the kept ones sum to 0.7.
    """
    settings = (sampling.temperature, sampling.top_k, sampling.top_p)
    temperature, top_k, top_p = (jnp.broadcast_to(x[:, None], logits.shape[:2]) for x in settings)
    # Before the temperature, which keeps the order: a large one makes different logits equal.
    logits = jax.lax.cond(jnp.any(top_k > 0), _best, lambda x, _: x, logits, top_k)
    # Beyond these bounds numbers overflow, or the reciprocal vanishes; there sampling is argmax, or uniform, already.
    scaled = logits / jnp.where(temperature > 0, jnp.clip(temperature, 1e-30, 1e30), 1.0)[..., None]
    return jax.lax.cond(jnp.any(top_p < 1.0), _nucleus, lambda x, *_: x, scaled, logits, top_p)


def _first(kept: Bool[Array, "*R V"]) -> Bool[Array, "*R V"]:
    ids = jnp.arange(kept.shape[-1])
    return ids == jnp.min(jnp.where(kept, ids, kept.shape[-1]), -1, keepdims=True)


def _best(logits: Float[Array, "*R V"], top_k: Int[Array, "*R"]) -> Float[Array, "*R V"]:
    """-inf outside the `top_k` best (0: all)."""
    # Equal numbers need equal bits: -0.0 is 0.0, as is a subnormal number where processors take it for 0.
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    wanted = jnp.where(top_k > 0, top_k, logits.shape[-1])
    kth = _largest(32, lambda t: jnp.sum(ordered >= t[..., None], -1) >= wanted, logits.shape[:-1])
    kept = ordered >= kth[..., None]
    kept = jnp.where((top_k == 1)[..., None], _first(kept), kept)
    # NaN must reach the pick, which ends the sequence; with its sign set it is ordered below all numbers.
    return jnp.where(kept | jnp.isnan(logits), logits, -jnp.inf)


def _nucleus(
    scaled: Float[Array, "*R V"], logits: Float[Array, "*R V"], top_p: Float[Array, "*R"]
) -> Float[Array, "*R V"]:
    """-inf outside the smallest set of the best that has the probability `top_p`."""
    probability = jax.nn.softmax(scaled, -1)
    bits = jax.lax.bitcast_convert_type(probability, jnp.uint32)

    def mass_reached(t):
        return jnp.sum(jnp.where(bits >= t[..., None], probability, 0.0), -1) >= top_p

    floor = _largest(31, mass_reached, scaled.shape[:-1])
    # Rounding may keep the whole mass just below top_p = 1: then the floor is 0 and everything stays.
    floor = jnp.where(top_p < 1.0, floor, 0)
    # Processors take a top_p below the smallest normal number for 0, which even no token at all would reach.
    single = (top_p < 1.0)[..., None] & (probability.max(-1, keepdims=True) >= top_p[..., None])
    kept = jnp.where(single, _first(logits == logits.max(-1, keepdims=True)), bits >= floor[..., None])
    return jnp.where(kept, scaled, -jnp.inf)


def _draw(
    sample: Callable[[Array], Array],
    sampling: Sampling,
    positions: Int[Array, "B W"],
    stream: int | Int[Array, "B W"] | None = None,
) -> Float[Array, "B W ..."]:
    """`sample(key)` for each position, with a key made from (seed, sequence, position) and the stream."""
    streams = jnp.broadcast_to(0 if stream is None else stream, positions.shape)

    def draw(seed, sequence, position, number):
        key = jax.random.fold_in(jax.random.fold_in(numerics.random_key(seed), sequence), position)
        return sample(key if stream is None else jax.random.fold_in(key, number))

    per_row = jax.vmap(draw, in_axes=(None, None, 0, 0))
    with jax.threefry_partitionable(True):  # whatever a user has set
        return jax.vmap(per_row)(sampling.seed, sampling.sequence, positions, streams)


def gumbel_noise(
    sampling: Sampling,
    positions: Int[Array, "B W"],
    vocab: int,
    stream: int | Int[Array, "B W"] | None = None,
) -> Float[Array, "B W V"]:
    """Standard Gumbel noise keyed by (seed, sequence, position): the same for every method.

    Args:
      stream: number of other draws for the same position; in `dllm` the number of the pass.
    """
    return _draw(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="low"), sampling, positions, stream)


def where_sampled(sampled: Callable, greedy: Callable, sampling: Sampling, execution: Execution, *arrays: Array) -> Any:
    """`sampled(sampling, *arrays)` of the sequences that sample, `greedy(logits)` of the others.

    Args:
      arrays: the logits `[B, W, V]`, and others `[B, W, ...]`. Where a vocabulary is spread over devices, a row of it
        is brought to one of them: no step of a search for a threshold is then a sum over devices.
    """
    columns, alone = execution.rows_spec(arrays[0].shape[1]), len(arrays[0]) == 1

    def of_sequence(values):
        sampling, *arrays = jax.tree.map(lambda x: x[None], values)
        chosen = jax.lax.cond(sampling.temperature[0] > 0, sampled, lambda _, x, *rest: greedy(x), sampling, *arrays)
        return jax.tree.map(lambda x: x[0], chosen)

    def local(sampling, *arrays):
        # One sequence after another: noise for a whole vocabulary is dear, and only some may need it.
        return sampled(sampling, *arrays) if alone else jax.lax.map(of_sequence, (sampling, *arrays))

    local = execution.per_device(local, (P(execution.batch), *[columns] * len(arrays)), columns)
    return jax.lax.cond(jnp.any(sampling.temperature > 0), local, lambda _, x, *rest: greedy(x), sampling, *arrays)


def pick(
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    sampling: Sampling,
    execution: Execution = ONE_DEVICE,
) -> Int[Array, "B W"]:
    """The target's own token for each position (Gumbel-max; argmax at temperature 0), or V where logits are NaN.

    `logits` are the target's, in float32, and score the absolute `positions`; `execution` is that of their model.
    """

    def sampled(sampling, logits, positions):
        return first_largest(filtered_logits(logits, sampling) + gumbel_noise(sampling, positions, logits.shape[-1]))

    greedy = functools.partial(first_largest, is_spread=execution.mesh is not None)
    return where_sampled(sampled, greedy, sampling, execution, logits, positions)


def sample_draft(
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    sampling: Sampling,
    execution: Execution = ONE_DEVICE,
) -> tuple[Int[Array, "B W"], Float[Array, "B W V"]]:
    """Draft tokens for `pick_or_reject`, and the distribution that each was drawn from: the drafter's, tempered and
    filtered. At temperature 0 the tokens are argmaxes, and the distributions anything."""

    def sampled(sampling, logits, positions):
        filtered = filtered_logits(logits, sampling)
        noise = gumbel_noise(sampling, positions, logits.shape[-1], DRAFTING)
        return argmax(filtered + noise), jax.nn.softmax(filtered, -1)

    def greedy(logits):
        return argmax(logits, execution=execution), jnp.zeros_like(logits)

    return where_sampled(sampled, greedy, sampling, execution, logits, positions)


def pick_or_reject(
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    sampling: Sampling,
    draft: Int[Array, "B W"],
    q: Float[Array, "B W U"],
    drafted: Bool[Array, "B W"],
    execution: Execution = ONE_DEVICE,
) -> Int[Array, "B W"]:
    """The token for each position by rejection sampling: the drafted one with probability `min(1, p / q)`, else a
    sample of `max(p - q, 0)`, normalised; where nothing was drafted a sample of `p`.

    `p` is the target's tempered, filtered distribution. A rejected token is never its own replacement, so the draft is
    accepted as far as it equals what comes back (`agreeing_prefix`). At temperature 0 the result is the argmax.

    Example: p = .6 .4, q = .9 .1, and token 0 drafted: it is kept with probability 2/3; else max(p - q, 0) = 0 .3 gives
    token 1. In all, token 0 comes with .9 x 2/3 = .6.

    Args:
      draft: the drafted token for each position, where `drafted`.
      q: the distribution that it was drawn from, given everything drafted before it; U may differ from V, where ids
        that only one model has are never drafted.
    """
    vocab = logits.shape[-1]
    q = jnp.pad(q[..., :vocab], ((0, 0), (0, 0), (0, max(vocab - q.shape[-1], 0))))

    def sampled(sampling, logits, positions, draft, q, drafted):
        def probability_of(distribution):
            return jnp.take_along_axis(distribution, draft[..., None], axis=-1)[..., 0]

        p = jax.nn.softmax(filtered_logits(logits, sampling), -1)
        dice = _draw(lambda key: jax.random.uniform(key, (), jnp.float32), sampling, positions, ACCEPTING)
        keep = drafted & (dice * probability_of(q) < probability_of(p))
        rest = jnp.maximum(p - q, 0.0)
        # Where p and q are equal up to rounding nothing may be left to sample from.
        rest = jnp.where(drafted[..., None] & (rest > 0).any(-1, keepdims=True), rest, p)
        replacement = first_largest(jnp.log(rest) + gumbel_noise(sampling, positions, vocab, RESAMPLING))
        return jnp.where(keep, draft, replacement)

    greedy = functools.partial(first_largest, is_spread=execution.mesh is not None)
    return where_sampled(sampled, greedy, sampling, execution, logits, positions, draft, q, drafted)


def logprobs_of(
    logits: Float[Array, "B W V"], picks: Int[Array, "B W"], best: int, execution: Execution = ONE_DEVICE
) -> Logprobs:
    """Log-probabilities of picks, and of the `best` (static) most probable tokens beside them.

    Where a vocabulary is spread over devices, a row of it is brought to one of them, as in `where_sampled`.
    """

    def local(logits: Array, picks: Array) -> Logprobs:
        # Not `logsumexp`: on CPU XLA rounds its sum by the number of rows, and the kernel sums each row by itself.
        first, share = argmax(logits, confidence=True)

        def logit_of(tokens: Array) -> Array:
            return jnp.take_along_axis(logits, tokens[..., None], axis=-1)

        highest, log_share = logit_of(first), jnp.log(share)[..., None]
        values, ids = jax.lax.top_k(logits, best)
        chosen = logit_of(picks) - highest + log_share
        return Logprobs(chosen[..., 0], ids, values - highest + log_share)

    columns = execution.rows_spec(logits.shape[1])
    local = execution.per_device(local, (columns, columns), columns)
    return constrain_rows(local(logits, picks), execution)


def agreeing_prefix(
    draft: Int[Array, "B M"], draft_length: Int[Array, " B"], picks: Int[Array, "B M1"]
) -> Int[Array, " B"]:
    """Number of leading drafted tokens that equal the target's own picks."""
    agrees = (draft == picks[:, : draft.shape[1]]) & (jnp.arange(draft.shape[1]) < draft_length[:, None])
    return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)


def is_stop(tokens: Int[Array, "B N"], eos: Int[Array, "B Z"]) -> Bool[Array, "B N"]:
    """Marks the tokens that are stop tokens of their sequence."""
    return (tokens[..., None] == eos[:, None]).any(-1)


def emitted_count(
    picks: Int[Array, "B M1"], accepted: Int[Array, " B"], left: Int[Array, " B"], eos: Int[Array, "B Z"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns the number of emitted picks, `accepted + 1`, cut after the first stop token and at `left`; and true where
    the last of them is a stop token."""
    count = jnp.minimum(accepted + 1, left)
    inside = is_stop(picks, eos) & (jnp.arange(picks.shape[1]) < count[:, None])
    stopped = inside.any(1)
    return jnp.where(stopped, jnp.argmax(inside, axis=1) + 1, count), stopped
