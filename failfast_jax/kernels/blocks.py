"""Matrices as quantised files store them: whole numbers of 4 or 8 bits, and scales for groups of inputs.

A number is `scale * code + minimum`; where there is no minimum, codes of 4 bits count from 8 (15 stands for 7).
llama.cpp's K-quants have scales on two levels: `scale` is then `outer_scale * scale`, and `minimum` alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

TILE, INPUTS = 16, 32
"""Outputs and inputs of a tile; equal TILE and INPUTS in `cpu_kernels.c`."""
GROUP = 128
"""Inputs with one scale that accelerators multiply at least cost."""
ACTIVATIONS = ("int8", "float32")
"""What rows are in a product of tiles: rounded to int8, or as they are."""
ARRAYS = ("codes", "scale", "minimum", "outer_scale", "outer_minimum")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=list(ARRAYS),
    meta_fields=["bits", "is_tiled", "padding", "activations", "output_axes"],
)
@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[*L, O, I]` in blocks. `matrix[...]` is itself, and `matrix[tokens]` rows of it as numbers.

    Attributes:
      codes: `[*L, O, I]` int8, or `[*L, O, I / 2]` uint8: input i of a group of 32 in the lower half of byte i, input
        16 + i in the upper one.
      scale: `[*L, O, I / group]` float16, or int8 if there is an `outer_scale`.
      minimum: like `scale`, or None.
      outer_scale, outer_minimum: `[*L, O, I / outer]` float16, or None.
      bits: 4 or 8.
      is_tiled: each array is in tiles for the CPU's kernel instead; see `tiled`.
      padding: outputs of the last tile that are none.
      activations: one of `ACTIVATIONS`, for products of tiles.
      output_axes: axes of outputs that are one, the last, in a matrix for XLA; 0: any other; see `transposed`.
    """

    codes: Shaped[Array, "*C"]
    scale: Shaped[Array, "*G"]
    minimum: Shaped[Array, "*G"] | None = None
    outer_scale: Float[Array, "*H"] | None = None
    outer_minimum: Float[Array, "*H"] | None = None
    bits: int = 8
    is_tiled: bool = False
    padding: int = 0
    activations: str = "float32"
    output_axes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        if self.output_axes:
            groups, group, outputs = self.codes.shape
            return (outputs, groups * group)
        if self.is_tiled:
            *leading, tiles, groups, _ = self.codes.shape
            return (*leading, tiles * TILE - self.padding, groups * INPUTS)
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.shape[-1] // self.scale.shape[-2 if self.is_tiled or self.output_axes else -1]

    def with_arrays(self, change: Callable[[Array], Array], **fields: Any) -> BlockMatrix:
        """The matrix with every array changed, and other `fields`."""
        return dataclasses.replace(jax.tree.map(change, self), **fields)

    def __getitem__(self, rows: Int[Array, "*R"] | Any) -> BlockMatrix | Float[Array, "*R I"]:
        """Rows of a matrix without leading axes, in float32."""
        if rows is Ellipsis:
            return self
        if not self.output_axes:
            return widened(self.chosen(rows))
        # A TPU gathers along the last axis by way of a copy of the whole array.
        chosen = jax.lax.platform_dependent(self, rows.reshape(-1), tpu=in_turn, default=BlockMatrix.chosen)
        return widened(chosen).reshape(*rows.shape, -1)

    def chosen(self, rows: Int[Array, "*R"]) -> BlockMatrix:
        """The same rows in blocks, not in tiles; of a transposed matrix, transposed."""
        if not self.is_tiled:
            return self.with_arrays(lambda part: part[..., rows] if self.output_axes else part[rows])
        tile, lane = rows // TILE, rows % TILE

        def take(part: Array, places: int) -> Array:
            # `places` bytes of each of the 16 outputs are neighbours: [tiles, *, 16, places] becomes [R, *, places].
            part = part.reshape(*part.shape[:1], -1, TILE, places)[tile, :, lane]
            return part.reshape(*rows.shape, -1)

        codes = take(self.codes, 4)
        rest = {name: part if (part := getattr(self, name)) is None else take(part, 1) for name in ARRAYS[1:]}
        return dataclasses.replace(self, codes=_as_codes(codes, self.bits), is_tiled=False, padding=0, **rest)

    def outputs(self, part: slice) -> BlockMatrix:
        """Some of the outputs."""
        if part == slice(None):
            return self
        start, stop, _ = part.indices(self.shape[-2])
        if self.is_tiled and stop == self.shape[-2] and start % TILE == 0:
            return self.with_arrays(lambda array: array[..., start // TILE :, :, :])
        return untiled(self).with_arrays(lambda array: array[..., part, :])


def _as_codes(codes: Array, bits: int) -> Array:
    """Codes from bytes, which are signed where they have 8 bits."""
    if bits == 4:
        return codes
    return codes.view(np.int8) if isinstance(codes, np.ndarray) else jax.lax.bitcast_convert_type(codes, jnp.int8)


def has_one_scale(blocks: BlockMatrix) -> bool:
    """True if each output has a single scale, and no minimum."""
    return not blocks.is_tiled and blocks.bits == 8 and blocks.scale.shape[-1] == 1 and blocks.minimum is None


def tiled(blocks: BlockMatrix) -> BlockMatrix:
    """The matrix in tiles of 16 outputs and 32 inputs, the last of them filled up with zeros; of numpy arrays.

    Codes become `[*L, O / 16, I / 32, 16 * 16 or 32 * 16]`, all others `[*L, O / 16, groups, 16]`. Four bytes of an
    output are neighbours: byte `64 * j + 4 * o + i` of a tile is byte `4 * j + i` of the 16 or 32 of output o.
    """
    padding = -blocks.shape[-2] % TILE

    def tile(part: np.ndarray) -> np.ndarray:
        if padding:
            part = np.pad(part, [(0, 0)] * (part.ndim - 2) + [(0, padding), (0, 0)])
        part = part.reshape(*part.shape[:-2], -1, TILE, part.shape[-1])
        return np.ascontiguousarray(part.swapaxes(-1, -2))  # [*L, O / 16, *, 16]

    # Four bytes are moved as one number.
    codes = tile(np.ascontiguousarray(blocks.codes).view(np.uint32)).view(np.uint8)
    codes = codes.reshape(*codes.shape[:-2], -1, INPUTS * TILE * blocks.bits // 8)
    rest = {name: part if (part := getattr(blocks, name)) is None else tile(np.asarray(part)) for name in ARRAYS[1:]}
    return dataclasses.replace(blocks, codes=codes, is_tiled=True, padding=padding, **rest)


def untiled(blocks: BlockMatrix) -> BlockMatrix:
    """The inverse of `tiled`, traceable."""
    if not blocks.is_tiled:
        return blocks
    outputs = blocks.shape[-2]

    def rows(part: Array, places: int) -> Array:
        leading = blocks.codes.shape[:-2]
        part = part.reshape(*leading, -1, TILE, places).swapaxes(-2, -3)
        return part.reshape(*leading[:-1], leading[-1] * TILE, -1)[..., :outputs, :]

    codes = _as_codes(rows(blocks.codes, 4), blocks.bits)
    rest = {name: part if (part := getattr(blocks, name)) is None else rows(part, 1) for name in ARRAYS[1:]}
    return dataclasses.replace(blocks, codes=codes, is_tiled=False, padding=0, **rest)


def unpacked(blocks: BlockMatrix) -> BlockMatrix:
    """The matrix with codes in int8 `[*L, O, I]`, in no tiles, traceable; a transposed one as `[O, I]`."""
    if not blocks.output_axes:
        blocks = untiled(blocks)
        return dataclasses.replace(blocks, codes=_codes(blocks, jnp), bits=8)
    blocks = dataclasses.replace(blocks, codes=blocks.codes.astype(jnp.int8), bits=8, output_axes=0)
    return blocks.with_arrays(lambda part: part.reshape(-1, part.shape[-1]).T)


def packed(blocks: BlockMatrix) -> BlockMatrix:
    """The matrix with its codes, which are of 4 bits in int8 (see `unpacked`), in pairs; traceable, or by numpy."""
    codes = (blocks.codes + np.int8(8 if blocks.minimum is None else 0)).astype(np.uint8)
    codes = codes.reshape(*blocks.codes.shape[:-1], -1, INPUTS)
    codes = codes[..., : INPUTS // 2] | codes[..., INPUTS // 2 :] << 4
    return dataclasses.replace(blocks, codes=codes.reshape(*blocks.codes.shape[:-1], -1), bits=4)


def transposed(blocks: BlockMatrix, *, in_pairs: bool = True) -> BlockMatrix:
    """The matrix as XLA multiplies by it on accelerators, traceable: its outputs are one axis, the last.

    Codes become `[I / group, group, O]`: int8, or of 4 bits uint4 with a minimum and int4 without; all others
    `[groups, O]`. In a product with the first two axes XLA for TPUs widens codes in registers. From any other form that
    was tried it writes a widened copy first.

    Args:
      in_pairs: false to hold codes of 4 bits in int8.
    """
    blocks, group = untiled(blocks), blocks.group

    def turned(part: Array) -> Array:
        return part.reshape(-1, part.shape[-1]).T

    codes = turned(_codes(blocks, jnp)).reshape(-1, group, math.prod(blocks.shape[:-1]))
    if blocks.bits == 4 and in_pairs:
        codes = codes.astype(jnp.int4 if blocks.minimum is None else jnp.uint4)
    rest = {name: part if (part := getattr(blocks, name)) is None else turned(part) for name in ARRAYS[1:]}
    return dataclasses.replace(blocks, codes=codes, output_axes=blocks.ndim - 1, **rest)


def in_turn(blocks: BlockMatrix, rows: Int[Array, " R"]) -> BlockMatrix:
    """`BlockMatrix.chosen` of a transposed matrix, one row after the other."""

    def sliced(part: Array) -> Array:
        columns = jax.lax.map(lambda row: jax.lax.dynamic_index_in_dim(part, row, part.ndim - 1, keepdims=False), rows)
        return jnp.moveaxis(columns, 0, -1)

    return blocks.with_arrays(sliced)


def transposed_numbers(blocks: BlockMatrix) -> Float[Array, "G N O"]:
    """The numbers of a transposed matrix, computed in float32."""
    scale = _levels(blocks.scale, blocks.outer_scale, jnp, axis=0)
    minimum = _levels(blocks.minimum, blocks.outer_minimum, jnp, axis=0)
    grouped = blocks.codes.astype(jnp.float32) * scale[:, None]
    return grouped if minimum is None else grouped + minimum[:, None]


def widened(blocks: BlockMatrix, dtype: DTypeLike = jnp.float32) -> Float[Array, "*L O I"]:
    """The numbers that a matrix in blocks stands for, in float32; by numpy, if its arrays are. Transposed: `[O, I]`."""
    if blocks.output_axes:
        grouped = transposed_numbers(blocks)
        return grouped.reshape(-1, grouped.shape[-1]).T.astype(dtype)
    blocks = untiled(blocks)
    xp = np if isinstance(blocks.codes, np.ndarray) else jnp
    codes = _codes(blocks, xp)
    scale, minimum = _levels(blocks.scale, blocks.outer_scale, xp), _levels(blocks.minimum, blocks.outer_minimum, xp)
    grouped = codes.astype(np.float32).reshape(*scale.shape, -1) * scale[..., None]
    if minimum is not None:
        grouped = grouped + minimum[..., None]
    return grouped.reshape(codes.shape).astype(dtype)


def _codes(blocks: BlockMatrix, xp: Any) -> Array:
    """Codes in int8 `[*L, O, I]`, of numpy or jax.numpy."""
    if blocks.bits == 8:
        return blocks.codes
    pairs = blocks.codes.reshape(*blocks.codes.shape[:-1], -1, INPUTS // 2)
    codes = xp.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(*blocks.codes.shape[:-1], -1).astype(xp.int8)
    return codes - xp.int8(8) if blocks.minimum is None else codes


def _arrays(blocks: BlockMatrix) -> dict[str, Array | None]:
    return {name: getattr(blocks, name) for name in ARRAYS}


def _levels(inner: Array | None, outer: Array | None, xp: Any, axis: int = -1) -> Array | None:
    """Scales in float32, from one level or two, of numpy or jax.numpy; `axis`: that of groups."""
    if inner is None or outer is None:
        return inner if inner is None else inner.astype(np.float32)
    repeated = xp.repeat(outer.astype(np.float32), inner.shape[axis] // outer.shape[axis], axis=axis)
    return repeated * inner.astype(np.float32)


def numbers(matrix: Float[Array, "*S"] | BlockMatrix) -> Float[Array, "*S"]:
    """A matrix as an array: widened, if it is in blocks; a transposed one as `[O, I]`, its shape."""
    return widened(matrix) if isinstance(matrix, BlockMatrix) else matrix


def same_form(matrices: list[BlockMatrix]) -> list[BlockMatrix]:
    """The same matrices, of numpy's arrays, with codes, scales and groups of one kind: as they are, where they agree.

    Otherwise codes become 8 bits, groups the shortest, and all have scales on two levels and a minimum.
    """

    def form(blocks: BlockMatrix) -> tuple:
        inputs = blocks.shape[-1]
        present = [part if part is None else (part.dtype, inputs / part.shape[-1]) for part in _arrays(blocks).values()]
        return blocks.bits, *present

    if len({form(blocks) for blocks in matrices}) == 1:
        return matrices
    inputs = matrices[0].shape[-1]
    groups = inputs // min(blocks.group for blocks in matrices)
    outer = max((blocks.scale if blocks.outer_scale is None else blocks.outer_scale).shape[-1] for blocks in matrices)
    return [_general(blocks, groups, outer) for blocks in matrices]


def _general(blocks: BlockMatrix, groups: int, outer: int) -> BlockMatrix:
    codes = _codes(blocks, np)

    def repeated(part: np.ndarray, count: int) -> np.ndarray:
        return np.repeat(part, count // part.shape[-1], axis=-1)

    def levels(inner: np.ndarray | None, above: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if inner is None:
            above = np.zeros((*codes.shape[:-1], 1), np.float16)
        if above is None:
            inner, above = None, inner
        ones = np.ones((*codes.shape[:-1], 1), np.int8)
        return repeated(ones if inner is None else inner, groups), repeated(above, outer)

    scale, outer_scale = levels(blocks.scale, blocks.outer_scale)
    minimum, outer_minimum = levels(blocks.minimum, blocks.outer_minimum)
    return BlockMatrix(codes, scale, minimum, outer_scale, outer_minimum)


def rounded(weight: Float[Array, "*L O I"], bits: int, group: int = INPUTS) -> BlockMatrix:
    """A matrix rounded to blocks: 8 bits with a scale, or 4 bits with a scale and a minimum; traceable, or by numpy.

    Args:
      group: inputs of a block; for 4 bits a multiple of 32.

    Raises:
      ValueError: the number of inputs is no multiple of `group`.
    """
    xp = np if isinstance(weight, np.ndarray) else jnp
    *outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"{inputs} inputs: blocks take multiples of {group}")
    grouped = weight.astype(np.float32).reshape(*outputs, -1, group)
    if bits == 8:
        # A scale of a whole output multiplies its sum, in float32: see `row_operations.xla_product`.
        scale = (xp.abs(grouped).max(axis=-1) / 127).astype(np.float16 if group == INPUTS else np.float32)
        codes = xp.clip(xp.round(_quotient(grouped, scale)), -127, 127).astype(np.int8)
        return BlockMatrix(codes.reshape(weight.shape), scale)
    # A TPU has no float16. Codes are those of the rounded scale and minimum.
    dtype = np.float16 if group == INPUTS else jnp.bfloat16
    minimum = grouped.min(axis=-1).astype(dtype)
    scale = ((grouped.max(axis=-1) - minimum.astype(np.float32)) / 15).astype(dtype)
    codes = xp.clip(xp.round(_quotient(grouped - minimum.astype(np.float32)[..., None], scale)), 0, 15)
    return packed(BlockMatrix(codes.astype(np.int8).reshape(weight.shape), scale, minimum))


def _quotient(grouped: Array, scale: Array) -> Array:
    xp, scale = np if isinstance(grouped, np.ndarray) else jnp, scale.astype(np.float32)[..., None]
    return xp.where(scale == 0, np.float32(0), grouped / xp.where(scale == 0, np.float32(1), scale))


def divisible(blocks: BlockMatrix, inputs: int) -> BlockMatrix:
    """The matrix, of numpy's arrays, with outer scales so fine that parts of so many inputs have theirs.

    Raises:
      ValueError: a group of inputs would be divided.
    """
    if inputs % max(blocks.group, INPUTS) and blocks.scale.shape[-1] > 1:
        raise ValueError(f"groups of {max(blocks.group, INPUTS)} inputs cannot be divided into parts of {inputs}")

    def finer(part: np.ndarray | None) -> np.ndarray | None:
        if part is None:
            return None
        size = blocks.shape[-1] // part.shape[-1]
        return np.repeat(part, size // math.gcd(size, inputs, GROUP), axis=-1)

    return dataclasses.replace(blocks, outer_scale=finer(blocks.outer_scale), outer_minimum=finer(blocks.outer_minimum))
