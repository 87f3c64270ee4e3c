"""Static-capacity KV cache, updated in place."""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.axes import Cache
from failfast_jax.kernels.attention_window import TILE, LayerCache
from failfast_jax.kernels.plain_attention import write_window
from failfast_jax.models.model_config import ModelConfig

TPU_TILE = 512
"""Positions per tile of the TPU kernel; tiles of 512 take half the time per position of tiles of 128."""


def round_up(value: int | Int[Array, "*R"], multiple: int) -> int | Int[Array, "*R"]:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer. It stores no lengths: its owner does, so rejecting tokens only moves a length
    back."""

    k: tuple[Cache, ...]
    """Rotated keys, one array a layer: batch, KV heads, capacity in positions, head dimension. Or one array, with the
    KV heads of one layer after the other, where a pass loops over layers."""
    v: tuple[Cache, ...]
    """Values, laid out like the keys."""

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.k[0].shape[2]

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """Keys and values by layer; stacked, of all."""
        return tuple(zip(self.k, self.v))

    @classmethod
    def of(cls, layers: Sequence[LayerCache]) -> KVCache:
        """The cache of some layers."""
        return cls(k=tuple(k for k, _ in layers), v=tuple(v for _, v in layers))

    @classmethod
    def zeros(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, *, is_stacked: bool = False
    ) -> KVCache:
        """An empty cache, in an array a layer or, stacked, one of all; `capacity` is rounded up to whole tiles."""
        arrays = 1 if is_stacked else config.num_layers
        heads = config.num_kv_heads * config.num_layers // arrays
        shape = (batch, heads, round_up(capacity, TILE), config.head_dim)
        k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(arrays)) for _ in "kv")
        return cls(k=k, v=v)


def move_slots(
    cache: Float[Array, "B K S H"], start: Int[Array, " B"], slots: Int[Array, "B M"], width: int
) -> Float[Array, "B K S H"]:
    """Copies the slots `start[b] + slots[b]` of each row to `start[b], start[b]+1, ...`.

    All of them lie within `width` slots from `start` on.
    """

    def window(row, at):
        return jax.lax.dynamic_slice_in_dim(row, at, width, axis=1)

    kept = jnp.take_along_axis(jax.vmap(window)(cache, start), slots[:, None, :, None], axis=2)
    return write_window(cache, kept.transpose(0, 2, 1, 3), start)
