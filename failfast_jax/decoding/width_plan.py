"""Static widths of a compilation: of verify passes, of prefill chunks, and of the buffers that hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.kv_cache import TILE, TPU_TILE, round_up


@dataclasses.dataclass(frozen=True)
class Widths:
    """The widths that `make_plan` chooses from, in rows. Each one that a plan holds is compiled.

    Attributes:
      verify: ascending verify widths; drafts too long for them have a width of their own.
      prefill: ascending chunk widths of the prefill.
      multiple: the width of the longest draft is rounded up to this, if `verify` does not hold it.
      exact: the constant width of every target step under `exact`, where rows differ between widths.
    """

    verify: tuple[int, ...]
    prefill: tuple[int, ...]
    multiple: int = 32
    exact: int = 72

    def ladder(self, rows: int) -> tuple[int, ...]:
        """Returns the verify widths for at most `rows` rows: the last one holds them.

        With `verify` 16 64 and `multiple` 8: 11 rows -> 16;  61 rows -> 16 64;  81 rows -> 16 64 88.
        """
        widest = round_up(rows, self.multiple)
        return *(width for width in self.verify if width < widest), widest


DEFAULT_WIDTHS = {
    # Two rows cost little more than one. Beyond a few, arithmetic bounds a step, in units of the rows that
    # `kernels.cpu_rows` sums at once: a verify is as narrow as it can be.
    "cpu": Widths(verify=(1, 2, 4, 8, 16, 32, 64, 96, 128), prefill=(32, 128, 256, 512)),
    "gpu": Widths(verify=(), prefill=(128, 512, 2048), multiple=8),
    # Memory bounds a step: by the compiler, 8 rows cost within 3 % of 16 in most programs (a seventh less on eight
    # chips, in one); but 64 cost up to a quarter more, and most drafts are short.
    "tpu": Widths(verify=(16, 64), prefill=(128, 512, 2048), multiple=8),
}
"""By platform; an entry may be replaced, for example by fewer widths where compiling takes longer than running."""


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


def make_plan(
    drafter: Drafter,
    *,
    platform: str,
    exact: bool = False,
    interchangeable: tuple[int, ...] = (),
    widths: Widths | None = None,
) -> Plan:
    """Chooses the widths for a drafter on a platform.

    Example: on CPU, for drafts of 4, 9 or 10 tokens, verifies of 8 and 16 rows: the narrowest that hold 5, 10 and 11.

    Args:
      drafter: its `shape` decides.
      platform: `cpu`, `gpu` or `tpu`, as of `jax.default_backend()`.
      exact: a row's result must not depend on the pass it is computed in. One constant width then serves every step,
        the prefill's too; or the `interchangeable` ones, whose rows were shown to be bit-identical.
      widths: the choice; None: the platform's in `DEFAULT_WIDTHS`.

    Returns:
      Static: pass it to `jit` by name in `static_argnames`.
    """
    shape, widths = drafter.shape, widths or DEFAULT_WIDTHS[platform]
    constant = exact and not interchangeable
    ladder, prefill = widths.ladder(shape.longest + 1), widths.prefill
    if exact:
        ladder = interchangeable or (widths.exact,)
        prefill = tuple(w for w in widths.prefill if w in interchangeable) or (widths.exact,)
    drafter_prefill = tuple(round_up(w, shape.chunk_multiple) for w in prefill)
    prefill = prefill if exact else drafter_prefill
    lengths = (*shape.lengths, shape.longest)
    needed = {widths.exact} if constant else {min(w for w in ladder if w > length) for length in lengths}
    tile = TPU_TILE if platform == "tpu" else TILE
    return Plan(tuple(sorted(needed)), prefill, drafter_prefill, constant, tile)


def buffer_length(capacity: int, drafter: Drafter, plan: Plan) -> int:
    """Positions to allocate for `capacity` tokens, a multiple of the plan's tile: a window of the drafter or of
    a verify may reach beyond the last token. It is the T of `DecodeState.tokens`."""
    shape = drafter.shape
    longest = round_up(shape.longest + 1, plan.widths[-1])
    widest = max(longest, shape.window + shape.longest, plan.prefill_widths[0], plan.drafter_prefill_widths[0])
    return round_up(capacity + widest, plan.tile)


def prefill_parts(drafter: Drafter, plan: Plan) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Returns chunk widths, with the models that they serve."""
    if plan.prefill_widths == plan.drafter_prefill_widths:
        return [(plan.prefill_widths, ("target", "drafter"))]
    parts = [(plan.prefill_widths, ("target",))]
    if drafter.shape.has_model or drafter.shape.feature_layers:
        parts.append((plan.drafter_prefill_widths, ("drafter",)))
    return parts


def prefill_schedule(
    prompt_tokens: int, drafter: Drafter, plan: Plan, buffer: int, begin: int = 0
) -> list[tuple[int, dict[str, Any]]]:
    """Returns start and static arguments of each `prefill_chunk` for all but the last of `prompt_tokens` tokens, in
    order: the target's chunks before those of a drafter that has others.

    Example: 300 tokens at widths 32 128 256 512 take chunks of 256, 32 and 32 positions: 512 would waste too much.

    Args:
      plan: has the widths.
      buffer: positions of the buffer, see `buffer_length`; no chunk reaches beyond.
      begin: positions that the caches hold already, a multiple of the drafter's `chunk_multiple`.
    """
    calls = []
    for widths, parts in prefill_parts(drafter, plan):
        start = begin
        while start < prompt_tokens - 1:
            left = prompt_tokens - 1 - start
            # A wider chunk than what is left only where that wastes less than half of it.
            fits = [w for w in widths if w <= max(left * 1.5, widths[0]) and start + w <= buffer]
            width = next((w for w in fits if w >= left), fits[-1])
            calls.append((start, {"width": width, "parts": parts}))
            start += width
    return calls
