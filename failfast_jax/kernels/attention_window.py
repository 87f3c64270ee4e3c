"""The window of one pass over a cache: the places of its rows, and the slots that each of them sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.axes import Cache, PerSequence, Scalar

TILE = 128
"""Attention reads the cache in tiles of this many positions, at absolute positions; capacities are multiples of it."""
TEXT, SLIDING, TREE, COPIES = "text", "sliding window", "tree", "copies"
"""Patterns of masks."""

LayerCache = tuple[Cache, Cache]
"""Rotated keys, and values, of one layer, or stacked of all."""


@flax.struct.dataclass
class TreeMask:
    """A window whose tokens are a tree, or a level of one: the position of a token is not its slot in the cache."""

    depth: Int[Array, "B W"]
    """Position of each token after the tree's first."""
    visible: Bool[Array, "B W C"]
    """The tree's tokens that each one sees: its ancestors and itself."""
    first: PerSequence | None = None
    """Slot and position of the tree's first token; None: the window's, which then holds the whole tree."""

    def positions(self, start: PerSequence) -> Int[Array, "B W"]:
        """Positions of the tokens of a window from `start` on."""
        return (start if self.first is None else self.first)[:, None] + self.depth


@flax.struct.dataclass
class RowGroups:
    """A window whose rows are C groups of one size, each with slots of its own: copies of one stretch of text.

    The slots of `[0, a)`, `[b, c)` and `[d, e)` are seen, for `seen` = a, b, c, d, e.
    """

    positions: Int[Array, "B W"]
    """Position of each row; its slot is another."""
    seen: Int[Array, "B C 5"]


@flax.struct.dataclass
class Window:
    """Places of the tokens of one pass over the cache, and the slots that they see; only `layer` differs by layer.

    Row w of a text stands at position `start + w` and sees the slots up to `last(W)` and from `first(W)` on:

      block_size 1, start 6, rows 6 7 8:                up to 6, 7, 8
      block_size 4, start 6, rows 6 7 8:                up to 7, 7, 11
      block_size 1, start 6, until 8, rows 6 7 8:       up to 8, 8, 8
      block_size 1, start 6, back 4, rows 6 7 8:        from 3, 4, 5 on
    """

    cos: Float[Array, "B W 1 h"] | None
    sin: Float[Array, "B W 1 h"] | None
    """Tables of the tokens' positions, see `models.rope.rotary`; None where queries are rotated already."""
    start: PerSequence
    """Cache slot of each sequence's first token; the others follow."""
    live: Scalar
    """Number of leading cache slots that any token may see; tiles beyond are not read."""
    until: Int[Array, " B"] | None = None
    """Every token sees at least the positions up to this one; None: the mask rule alone."""
    visible: Bool[Array, "B W C"] | None = None
    """Of a tree: the slots from `tree_start` on that each token sees. It sees all slots before, and none after."""
    seen: Int[Array, "B C 5"] | None = None
    """Slots that the rows of each of C groups see, instead of the mask rule; see `RowGroups`."""
    tree_start: PerSequence | None = None
    """Cache slot of the tree's first token; None: the window's, which then holds the whole tree."""
    block_size: int = flax.struct.field(pytree_node=False, default=1)
    """Mask rule: causal (1) or block-causal."""
    back: int | None = flax.struct.field(pytree_node=False, default=None)
    """Of a sliding window: a token sees its own position and the `back - 1` before it, of what it sees; None: all."""
    layer: Scalar | None = None
    """The layer to read and write of a stacked cache: the KV heads of `layers`, one layer's after the other. None: the
    cache holds one layer."""
    layers: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def pattern(self) -> str:
        """`TEXT`, `SLIDING`, `TREE` or `COPIES`."""
        if self.visible is not None:
            return TREE
        if self.seen is not None:
            return COPIES
        return TEXT if self.back is None else SLIDING

    def last(self, width: int) -> Int[Array, "B W"]:
        """Last position that each row of a text sees."""
        last = visible_until(self.start[:, None] + jnp.arange(width), self.block_size)
        return last if self.until is None else jnp.maximum(last, self.until[:, None])

    def first(self, width: int) -> Int[Array, "B W"]:
        """First position that each row of a text sees."""
        positions = self.start[:, None] + jnp.arange(width)
        return jnp.zeros_like(positions) if self.back is None else positions - (self.back - 1)

    def mask(self, width: int, slots: Int[Array, " S"]) -> Bool[Array, "B W S"]:
        """True for the slots that each of `width` rows sees."""
        if self.visible is not None:
            return _tree_mask(self.start if self.tree_start is None else self.tree_start, self.visible, slots)
        if self.seen is not None:
            return in_ranges(slots, jnp.repeat(self.seen, width // self.seen.shape[1], axis=1))
        mask = slots <= self.last(width)[..., None]
        return mask if self.back is None else mask & (slots >= self.first(width)[..., None])

    def live_mask(self, width: int, capacity: int) -> Bool[Array, "B W S"]:
        """`mask` of the slots below `live`; slot 0 stays, so that no row is left without a key."""
        slots = jnp.arange(capacity)
        return self.mask(width, slots) & (slots < jnp.maximum(self.live, 1))

    def of_layer(self, cache: LayerCache) -> tuple[Array, Array]:
        """A copy of the keys and values of the window's layer."""
        heads = cache[0].shape[1] // self.layers
        k, v = (jax.lax.dynamic_slice_in_dim(part, self.first_head(heads), heads, axis=1) for part in cache)
        return k, v

    def with_layer(self, cache: LayerCache, written: tuple[Array, Array]) -> tuple[Array, Array]:
        """The cache with other keys and values of the window's layer."""
        place = self.first_head(written[0].shape[1])
        k, v = (jax.lax.dynamic_update_slice_in_dim(*parts, place, axis=1) for parts in zip(cache, written))
        return k, v

    def first_head(self, kv_heads: int) -> int | Scalar:
        """Place in the cache of the first of a layer's KV heads."""
        return 0 if self.layer is None else self.layer * kv_heads

    def part(self, rows: slice) -> Window:
        """The window of some of its rows: whole groups, where it has groups."""
        cos, sin = (None if table is None else table[:, rows] for table in (self.cos, self.sin))
        window = self.replace(cos=cos, sin=sin, start=self.start + rows.start)
        if self.seen is None:
            return window
        size = self.cos.shape[1] // self.seen.shape[1]
        return window.replace(seen=self.seen[:, rows.start // size : rows.stop // size])


def visible_until(positions: Int[Array, "..."], block_size: int) -> Int[Array, "..."]:
    """Last position that a query sees: `i // D >= j // D` with D = block_size (1: causal)."""
    return positions // block_size * block_size + (block_size - 1)


def in_ranges(slots: Int[Array, "..."], ends: Int[Array, "*R 5"]) -> Bool[Array, "..."]:
    """True for slots in `[0, a)`, `[b, c)` or `[d, e)`; `ends[..., :1]` and so on broadcast against them."""
    a, b, c, d, e = (ends[..., index : index + 1] for index in range(5))
    return (slots < a) | ((slots >= b) & (slots < c)) | ((slots >= d) & (slots < e))


def _tree_mask(first: PerSequence, visible: Bool[Array, "B W C"], slots: Int[Array, " S"]) -> Bool[Array, "B W S"]:
    batch, width, slots_of_tree = visible.shape
    inside = slots - first[:, None]
    columns = jnp.clip(inside, 0, slots_of_tree - 1)[:, None]
    columns = jnp.broadcast_to(columns, (batch, width, slots.shape[0]))
    mask = jnp.take_along_axis(visible, columns, axis=2) & (inside < slots_of_tree)[:, None]
    return mask | (inside < 0)[:, None]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """The shapes and the device by which a kernel is chosen.

    Attributes:
      dtype: dtype of the cache.
      head_dim: size of queries, keys and values.
      heads: query heads.
      kv_heads: heads of keys and values.
      capacity: positions of the cache.
      width: rows of the window; None: not known yet, as before a model is loaded.
      pattern: kind of mask: `TEXT`, `SLIDING`, `TREE` or `COPIES`.
      copies: groups of rows, if the pattern is `COPIES`.
      device: its `platform`, and `device_kind` (TPU) or `compute_capability` (GPU); None: only shapes are asked for.
    """

    dtype: DTypeLike
    head_dim: int
    heads: int = 1
    kv_heads: int = 1
    capacity: int = TILE
    width: int | None = None
    pattern: str = TEXT
    copies: int = 1
    device: Any = None

    @classmethod
    def of(cls, heads: int, width: int, cache: LayerCache, window: Window) -> AttentionCase:
        """The case of one pass: `width` rows of `heads` query heads."""
        _, kv_heads, capacity, head_dim = cache[0].shape
        kv_heads //= window.layers
        copies = 1 if window.seen is None else window.seen.shape[1]
        sizes = {"heads": heads, "kv_heads": kv_heads, "capacity": capacity, "width": width}
        return cls(cache[0].dtype, head_dim, **sizes, pattern=window.pattern, copies=copies)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Cases that a kernel takes.

    Attributes:
      patterns: kinds of masks.
      rows: maximum rows of a window, or of each copy; None: any number.
      head_dims: sizes of a head; None: any.
      capacity: the cache's positions are a multiple of it.
      dtypes: dtypes of the cache.
    """

    patterns: tuple[str, ...]
    rows: int | None
    head_dims: tuple[int, ...] | range | None
    capacity: int
    dtypes: tuple[str, ...]

    def refusal(self, case: AttentionCase) -> str | None:
        """Returns why a case is not taken, or None if it is."""
        dtype, sizes, width = jnp.dtype(case.dtype).name, self.head_dims, case.width
        if case.pattern not in self.patterns:
            return f"a {case.pattern}"
        if self.rows and width is not None and not 1 <= (rows := width // case.copies) <= self.rows:
            return f"a window of {rows} rows: 1 to {self.rows}"
        if case.heads % case.kv_heads:
            return f"{case.heads} query heads for {case.kv_heads} KV heads"
        if sizes is not None and case.head_dim not in sizes:
            multiples = isinstance(sizes, range)
            listed = f"multiples of {sizes.step} up to {sizes[-1]}" if multiples else ", ".join(map(str, sizes))
            return f"head_dim {case.head_dim}: {listed}"
        if case.capacity % self.capacity:
            return f"a cache of {case.capacity} positions: a multiple of {self.capacity}"
        return None if dtype in self.dtypes else f"a cache of {dtype}: {', '.join(self.dtypes)}"
