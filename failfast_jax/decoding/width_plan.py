"""Static widths of a compilation: of verify passes, of prefill chunks, and of the buffers that hold them."""

from __future__ import annotations

import dataclasses

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.kv_cache import TILE, TPU_TILE, round_up

CPU_LADDER = (1, 4, 8, 16, 32, 64, 96, 128)
"""Multiples of the rows that `kernels.cpu_product` sums at once. Beyond a few, arithmetic bounds a step there: a verify
is as narrow as it can be."""
CPU_PREFILL_WIDTHS = (32, 128, 256, 512)
TPU_LADDER = (16, 64)
"""Memory bounds a step there: by the compiler, 8 rows cost within 3 % of 16 in most programs (a seventh less on eight
chips, in one); but 64 cost up to a quarter more, and most drafts are short."""
ACCELERATOR_ROWS = 8
"""On TPU and GPU verifies are padded to a multiple of this; on GPU they have one width."""
EXACT_WIDTH = 72
"""The constant width of every target step under `exact`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static widths of a compilation.

    Attributes:
      widths: ascending verify widths; a round uses the narrowest that holds its longest draft plus one.
      prefill_widths: ascending chunk widths of the target's prefill.
      drafter_prefill_widths: the drafter's; where they are the same, one call serves both models.
      constant: `widths` is a single width that also serves drafts longer than it, in several passes.
      tile: buffers are multiples of it.
    """

    widths: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    drafter_prefill_widths: tuple[int, ...]
    constant: bool = False
    tile: int = TILE


def make_plan(drafter: Drafter, *, platform: str, exact: bool = False, interchangeable: tuple[int, ...] = ()) -> Plan:
    """Chooses the widths for a drafter on a platform.

    Args:
      drafter: its `shape` decides.
      platform: `cpu`, `gpu` or `tpu`, as of `jax.default_backend()`.
      exact: a row's result must not depend on the pass it is computed in. One constant width then serves
        every step, the prefill's too.
      interchangeable: under `exact`, widths whose rows were shown to be bit-identical; they serve as the
        ladder instead of the constant width.

    Returns:
      Static: pass it to `jit` by name in `static_argnames`.

    Raises:
      ValueError: a drafter that reads the target's features, and whose `chunk_multiple` does not divide the widths of
        the target's prefill.
    """
    shape = drafter.shape
    multiple, longest = shape.chunk_multiple, shape.longest + 1
    tile = TPU_TILE if platform == "tpu" else TILE
    if exact and not interchangeable:
        drafter_prefill = (round_up(EXACT_WIDTH, multiple),)
        return _with_features(drafter, Plan((EXACT_WIDTH,), (EXACT_WIDTH,), drafter_prefill, True, tile))
    if platform == "cpu":
        ladder = interchangeable if exact else cpu_ladder(longest)
        prefill = tuple(w for w in CPU_PREFILL_WIDTHS if not exact or w in interchangeable)
    else:
        widest = round_up(longest, ACCELERATOR_ROWS)
        ladder = (*(w for w in TPU_LADDER if platform == "tpu" and w < widest), widest)
        prefill = (128, 512, 2048)
    needed = {min(w for w in ladder if w > length) for length in (*shape.lengths, shape.longest)}
    widths = tuple(sorted(needed))
    drafter_prefill = tuple(round_up(w, multiple) for w in prefill)
    return _with_features(drafter, Plan(widths, prefill if exact else drafter_prefill, drafter_prefill, tile=tile))


def _with_features(drafter: Drafter, plan: Plan) -> Plan:
    if drafter.shape.feature_layers and plan.prefill_widths != plan.drafter_prefill_widths:
        raise ValueError(
            f"{type(drafter).__name__} reads the target's features, so both must prefill in the same chunks: its "
            f"chunk_multiple {drafter.shape.chunk_multiple} does not divide the target's {plan.prefill_widths}"
        )
    return plan


def cpu_ladder(longest: int) -> tuple[int, ...]:
    """Verify widths on CPU; the last one holds `longest` rows."""
    return CPU_LADDER if longest <= CPU_LADDER[-1] else (*CPU_LADDER, round_up(longest, 32))


def buffer_length(capacity: int, drafter: Drafter, plan: Plan) -> int:
    """Positions to allocate for `capacity` tokens, a multiple of the plan's tile: a window of the drafter or of
    a verify may reach beyond the last token. It is the T of `DecodeState.tokens`."""
    shape = drafter.shape
    longest = round_up(shape.longest + 1, plan.widths[-1])
    widest = max(longest, shape.window + shape.longest, plan.prefill_widths[0], plan.drafter_prefill_widths[0])
    return round_up(capacity + widest, plan.tile)


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One `prefill_chunk`: where it starts and its static arguments."""

    start: int
    width: int
    parts: tuple[str, ...]


def prefill_parts(drafter: Drafter, plan: Plan) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Chunk widths, and which of the two models they serve."""
    if plan.prefill_widths == plan.drafter_prefill_widths:
        return [(plan.prefill_widths, ("target", "drafter"))]
    parts = [(plan.prefill_widths, ("target",))]
    if drafter.shape.has_model or drafter.shape.feature_layers:
        parts.append((plan.drafter_prefill_widths, ("drafter",)))
    return parts


def prefill_schedule(
    prompt_tokens: int, drafter: Drafter, plan: Plan, buffer: int, begin: int = 0
) -> list[PrefillCall]:
    """Chunks that cover all but the last of `prompt_tokens` tokens, within a buffer of `buffer` positions.

    Args:
      prompt_tokens: of the longest prompt.
      drafter: its own chunks are beside the target's where their widths differ.
      plan: says which widths there are.
      buffer: see `buffer_length`.
      begin: positions that the caches hold already, a multiple of the drafter's `chunk_multiple`.

    Returns:
      Arguments of `prefill_chunk`, in order: the target's chunks before those of a drafter that has others.
    """

    def chunks(widths: tuple[int, ...], parts: tuple[str, ...]) -> list[PrefillCall]:
        calls, start = [], begin
        while start < prompt_tokens - 1:
            left = prompt_tokens - 1 - start
            # A wider chunk than what is left only where that wastes less than half of it.
            fits = [w for w in widths if w <= max(left * 1.5, widths[0]) and start + w <= buffer]
            width = next((w for w in fits if w >= left), fits[-1])
            calls.append(PrefillCall(start, width, parts))
            start += width
        return calls

    return [call for widths, parts in prefill_parts(drafter, plan) for call in chunks(widths, parts)]
