"""Matrices as quantised files store them: whole numbers of 4 or 8 bits, and scales for groups of inputs.

A number is `scale * code + minimum`; where there is no minimum, codes of 4 bits count from 8 (15 stands for 7).
llama.cpp's K-quants have scales on two levels: `scale` is then `outer_scale * scale`, and `minimum` alike.

A matrix has one of three layouts: `StoredMatrix`, as it is read; and those of a model, `TiledMatrix` for the CPU's
kernel and `TransposedMatrix` for XLA.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

TILE, INPUTS = 16, 32
"""Outputs and inputs of a tile; equal TILE and INPUTS in `cpu_kernels.c`."""
GROUP = 128
"""Group size of `--quantize int4` on TPU and GPU: the cheapest to multiply by."""
WORD_SHIFTS = (4 * np.arange(4)[:, None, None, None] + 16 * np.arange(2)[:, None]).astype(np.uint32)
"""First bits of codes in a word, see `TransposedMatrix`: `[4, 1, 2, 1]` for codes `[4, 8, 2, O]` of 64 inputs."""
ACTIVATIONS = ("int8", "float32")
"""What rows are in a product of tiles: rounded to int8, or as they are."""
ARRAYS = ("codes", "scale", "minimum", "outer_scale", "outer_minimum")


@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[*L, O, I]` in blocks: what the three layouts share.

    `matrix[...]` is itself, and `matrix[tokens]` rows of a matrix without leading axes, in float32. Each layout has
    `shape`, that of the numbers; `take_rows`, which are in blocks; and `dequantized`, all numbers in float32.

    Attributes:
      codes: whole numbers.
      scale, minimum, outer_scale, outer_minimum: one for each group of inputs of an output; all but `scale` may be
        None.
      bits: 4 or 8.
    """

    GROUP_AXIS: ClassVar[int]
    """The axis of `scale` and the like that counts groups."""

    codes: Shaped[Array, "*C"]
    scale: Shaped[Array, "*G"]
    minimum: Shaped[Array, "*G"] | None = None
    outer_scale: Float[Array, "*H"] | None = None
    outer_minimum: Float[Array, "*H"] | None = None
    bits: int = 8

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.shape[-1] // self.scale.shape[self.GROUP_AXIS]

    def scales(self, change: Callable[[Array], Array]) -> dict[str, Array | None]:
        """All arrays but the codes, those that are there changed, by their names."""
        parts = {name: getattr(self, name) for name in ARRAYS[1:]}
        return {name: part if part is None else change(part) for name, part in parts.items()}

    def with_arrays(self, change: Callable[[Array], Array]) -> BlockMatrix:
        """The matrix with every array changed."""
        return jax.tree.map(change, self)

    def __getitem__(self, rows: Int[Array, "*R"] | Any) -> BlockMatrix | Float[Array, "*R I"]:
        if rows is Ellipsis:
            return self
        return self.take_rows(rows.reshape(-1)).dequantized().reshape(*rows.shape, -1)


def _is_layout(*fields: str) -> Callable[[type], type]:
    """Registers a layout as a pytree of its arrays; `fields` are static, as the bits are."""
    register = functools.partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=["bits", *fields])
    return lambda layout: register(dataclasses.dataclass(frozen=True)(layout))


@_is_layout()
class StoredMatrix(BlockMatrix):
    """A matrix as it is read, output by output.

    Attributes:
      codes: `[*L, O, I]` int8, or `[*L, O, I / 2]` uint8: input i of a group of 32 in the lower half of byte i, input
        16 + i in the upper one.
      scale: `[*L, O, I / group]` float16, or int8 if there is an `outer_scale`.
      minimum: like `scale`.
      outer_scale, outer_minimum: `[*L, O, I / outer]` float16.
    """

    GROUP_AXIS = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    def dequantized(self) -> Float[Array, "*L O I"]:
        """The numbers, in float32; by numpy, if the arrays are."""
        codes, (scale, minimum) = self.unpacked(), _in_one_level(self)
        numbers = codes.astype(np.float32).reshape(*scale.shape, -1) * scale[..., None]
        if minimum is not None:
            numbers = numbers + minimum[..., None]
        return numbers.reshape(codes.shape)

    def unpacked(self) -> Int[Array, "*L O I"]:
        """The codes in int8; of 4 bits without a minimum: from -8."""
        if self.bits == 8:
            return self.codes
        xp = np if isinstance(self.codes, np.ndarray) else jnp
        pairs = self.codes.reshape(*self.codes.shape[:-1], -1, INPUTS // 2)
        codes = xp.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(self.shape).astype(xp.int8)
        return codes - xp.int8(8) if self.minimum is None else codes


@_is_layout("padding", "activations")
class TiledMatrix(BlockMatrix):
    """A matrix in tiles of 16 outputs and 32 inputs, the last outputs filled up with zeros.

    Attributes:
      codes: `[*L, O / 16, I / 32, 16 * 16 or 32 * 16]` uint8. Four bytes of an output are neighbours: byte
        `64 * j + 4 * o + i` of a tile is byte `4 * j + i` of the 16 or 32 of output o.
      scale, minimum, outer_scale, outer_minimum: `[*L, O / 16, groups, 16]`.
      padding: outputs of the last tile that are none.
      activations: one of `ACTIVATIONS`.
    """

    GROUP_AXIS = -2
    padding: int = 0
    activations: str = "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        *leading, tiles, groups, _ = self.codes.shape
        return (*leading, tiles * TILE - self.padding, groups * INPUTS)

    def take_rows(self, rows: Int[Array, "*R"]) -> StoredMatrix:
        """Rows of a matrix without leading axes."""
        tile, lane = rows // TILE, rows % TILE

        def take(part: Array, places: int = 1) -> Array:
            # `places` bytes of each of the 16 outputs are neighbours: [tiles, *, 16, places] becomes [R, *, places].
            part = part.reshape(*part.shape[:1], -1, TILE, places)[tile, :, lane]
            return part.reshape(*rows.shape, -1)

        codes = take(self.codes, 4)
        if self.bits == 8:
            is_numpy = isinstance(codes, np.ndarray)
            codes = codes.view(np.int8) if is_numpy else jax.lax.bitcast_convert_type(codes, jnp.int8)
        return StoredMatrix(codes, **self.scales(take), bits=self.bits)

    def outputs_from(self, first: int) -> TiledMatrix:
        """All outputs but those before one, which begins a tile."""
        return self.with_arrays(lambda part: part[..., first // TILE :, :, :])

    def stored(self) -> StoredMatrix:
        """The matrix as it was read."""
        *leading, outputs, _ = self.shape
        flat = self.with_arrays(lambda part: part.reshape(-1, *part.shape[-2:]))
        rows = np.arange(len(flat.codes) * TILE).reshape(*leading, -1)
        return flat.take_rows(rows[..., :outputs])

    def dequantized(self) -> Float[Array, "*L O I"]:
        """The numbers, in float32; by numpy, if the arrays are."""
        return self.stored().dequantized()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledLayer:
    """One layer's matrix of a `TiledStack`, not copied; as an array, `matrix[...]` is itself.

    Attributes:
      forms: `[layers, *L, O, I]` each, see `TiledStack`.
      form, place: the number of the layer's form, and its place there.
    """

    forms: tuple[TiledMatrix, ...]
    form: Int[ArrayLike, ""]
    place: Int[ArrayLike, ""]

    def __getitem__(self, _: Any) -> TiledLayer:
        return self

    def dequantized(self) -> Float[Array, "*L O I"]:
        """The numbers, in float32."""
        matrices = [form.with_arrays(lambda part: part[self.place]) for form in self.forms]
        return jax.lax.switch(self.form, [matrix.dequantized for matrix in matrices])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["forms"], meta_fields=["places"])
@dataclasses.dataclass(frozen=True)
class TiledStack:
    """The same matrix of all layers. As an array, `stack[...]` is itself.

    Attributes:
      forms: `[layers, *L, O, I]` each: the matrices of those layers that agree in bits, groups and scales.
      places: the number of each layer's form, and its place there: ((0, 0), (1, 0), (0, 1)) for forms a, b, a.
    """

    forms: tuple[TiledMatrix, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, matrices: Sequence[TiledMatrix], join: Callable[..., Array]) -> TiledStack:
        """Stacks matrices, with a function that stacks arrays."""
        forms: dict[tuple, list[TiledMatrix]] = {}
        places = []
        for matrix in matrices:
            form = jax.tree.structure(matrix), *((part.shape, part.dtype) for part in jax.tree.leaves(matrix))
            alike = forms.setdefault(form, [])
            places.append((list(forms).index(form), len(alike)))
            alike.append(matrix)
        return cls(tuple(jax.tree.map(join, *alike) for alike in forms.values()), tuple(places))

    def __getitem__(self, _: Any) -> TiledStack:
        return self

    def layer(self, index: Int[ArrayLike, ""]) -> TiledLayer:
        """A layer's matrix."""
        if len(self.forms) == 1:
            return TiledLayer(self.forms, 0, index)
        form, place = jnp.asarray(self.places, jnp.int32)[index]
        return TiledLayer(self.forms, form, place)


@_is_layout("output_axes")
class TransposedMatrix(BlockMatrix):
    """A matrix as XLA multiplies by it, best on accelerators: its outputs are one axis, the last.

    In a product with the first two axes XLA for TPUs widens codes in registers. From any other form that was tried it
    writes a widened copy first.

    Attributes:
      codes: `[I / group, group, O]`: int8, or of 4 bits uint4 with a minimum and int4 without; or `[I / 8, O]` int32,
        words for `tpu_blocks`: of the 8 for 64 inputs word s has in bits 4 * j to 4 * j + 3 input 16 * j + 2 * s, and
        the next one 16 bits higher.
      scale, minimum, outer_scale, outer_minimum: `[groups, O]`.
      output_axes: number of the original output axes, flattened into the last one.
    """

    GROUP_AXIS = 0
    output_axes: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers, `[O, I]`."""
        *inputs, outputs = self.codes.shape
        return (outputs, math.prod(inputs) * (8 if self.in_words else 1))

    @property
    def in_words(self) -> bool:
        """True if the codes are words."""
        return self.codes.ndim == 2

    def take_rows(self, rows: Int[Array, " R"]) -> TransposedMatrix:
        """The matrix of some of its outputs."""
        # A TPU gathers along the last axis by way of a copy of the whole array.
        return jax.lax.platform_dependent(
            self,
            tpu=lambda matrix: matrix.with_arrays(functools.partial(in_turn, rows=rows)),
            default=lambda matrix: matrix.with_arrays(lambda part: part[..., rows]),
        )

    def grouped(self) -> Float[Array, "G N O"]:
        """The numbers, in float32, as the codes are."""
        scale, minimum = _in_one_level(self)
        numbers = self.unpacked().astype(jnp.float32) * scale[:, None]
        return numbers if minimum is None else numbers + minimum[:, None]

    def dequantized(self) -> Float[Array, "O I"]:
        """The numbers, in float32."""
        return self.grouped().reshape(-1, self.codes.shape[-1]).T

    def unpacked(self) -> Int[Array, "G N O"]:
        """The codes in groups, of words in int8."""
        if not self.in_words:
            return self.codes
        codes = self.codes.astype(jnp.uint32).reshape(-1, 1, 8, 1, self.shape[0]) >> WORD_SHIFTS & 15
        return codes.astype(jnp.int8).reshape(len(self.scale), -1, self.shape[0]) - (8 if self.minimum is None else 0)


def in_turn(part: Shaped[Array, "*G O"], rows: Int[Array, " R"]) -> Shaped[Array, "*G R"]:
    """`part[..., rows]`: gathers columns in a loop."""

    def add(at: Array, taken: Array) -> Array:
        column = jax.lax.dynamic_slice_in_dim(part, rows[at], 1, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(taken, column, at, axis=-1)

    return jax.lax.fori_loop(0, len(rows), add, jnp.zeros((*part.shape[:-1], len(rows)), part.dtype))


def _in_one_level(blocks: BlockMatrix) -> tuple[Array, Array | None]:
    """Scale and minimum in float32, from one level or two; of numpy's arrays, if they are."""
    xp, axis = np if isinstance(blocks.codes, np.ndarray) else jnp, blocks.GROUP_AXIS

    def level(inner: Array | None, outer: Array | None) -> Array | None:
        if inner is None or outer is None:
            return inner if inner is None else inner.astype(np.float32)
        return xp.repeat(outer.astype(np.float32), inner.shape[axis] // outer.shape[axis], axis) * inner

    return level(blocks.scale, blocks.outer_scale), level(blocks.minimum, blocks.outer_minimum)


def tile(matrix: StoredMatrix) -> TiledMatrix:
    """A matrix, of numpy's arrays, in tiles."""
    padding = -matrix.shape[-2] % TILE

    def tiles(part: np.ndarray) -> np.ndarray:
        if padding:
            part = np.pad(part, [(0, 0)] * (part.ndim - 2) + [(0, padding), (0, 0)])
        part = part.reshape(*part.shape[:-2], -1, TILE, part.shape[-1])
        return np.ascontiguousarray(part.swapaxes(-1, -2))  # [*L, O / 16, *, 16]

    # Four bytes are moved as one number.
    codes = tiles(np.ascontiguousarray(matrix.codes).view(np.uint32)).view(np.uint8)
    codes = codes.reshape(*codes.shape[:-2], -1, INPUTS * TILE * matrix.bits // 8)
    return TiledMatrix(codes, **matrix.scales(tiles), bits=matrix.bits, padding=padding)


def transpose(matrix: StoredMatrix, *, in_pairs: bool = True, in_words: bool = False) -> TransposedMatrix:
    """A matrix transposed; traceable.

    Args:
      in_pairs: false to hold codes of 4 bits in int8.
      in_words: true to hold them in words, if there are as many inputs as `tpu_blocks` takes, in such groups.
    """

    def turned(part: Array) -> Array:
        return part.reshape(-1, part.shape[-1]).T

    codes = turned(matrix.unpacked()).reshape(-1, matrix.group, math.prod(matrix.shape[:-1]))
    is_served = matrix.shape[-1] % GROUP == 0 and GROUP % matrix.group == 0 and matrix.outer_scale is None
    if matrix.bits == 4 and in_words and is_served:
        codes = (codes + (8 if matrix.minimum is None else 0)).astype(jnp.uint32).reshape(-1, 4, 8, 2, codes.shape[-1])
        codes = (codes << WORD_SHIFTS).sum(axis=(1, 3), dtype=jnp.uint32).astype(jnp.int32).reshape(-1, codes.shape[-1])
    elif matrix.bits == 4 and in_pairs:
        codes = codes.astype(jnp.int4 if matrix.minimum is None else jnp.uint4)
    return TransposedMatrix(codes, **matrix.scales(turned), bits=matrix.bits, output_axes=matrix.ndim - 1)


def as_array(matrix: Float[Array, "*S"] | BlockMatrix | TiledLayer) -> Float[Array, "*S"]:
    """A matrix as an array: dequantised, if it is in blocks; a transposed one as `[O, I]`, its shape."""
    return matrix.dequantized() if isinstance(matrix, BlockMatrix | TiledLayer) else matrix


def unify_forms(matrices: list[StoredMatrix]) -> list[StoredMatrix]:
    """The same matrices, of numpy's arrays, with codes, scales and groups of one kind: as they are, where they agree.

    Otherwise codes become 8 bits, groups the shortest, and all have scales on two levels and a minimum. ValueError:
    the shortest groups do not divide the others.
    """

    def form(matrix: StoredMatrix) -> tuple:
        parts = (getattr(matrix, name) for name in ARRAYS)
        kinds = [part if part is None else (part.dtype, matrix.shape[-1] / part.shape[-1]) for part in parts]
        return matrix.bits, *kinds

    if len({form(matrix) for matrix in matrices}) == 1:
        return matrices
    groups = matrices[0].shape[-1] // min(matrix.group for matrix in matrices)
    outer = max((matrix.scale if matrix.outer_scale is None else matrix.outer_scale).shape[-1] for matrix in matrices)
    return [_general(matrix, groups, outer) for matrix in matrices]


def _general(matrix: StoredMatrix, groups: int, outer: int) -> StoredMatrix:
    codes = matrix.unpacked()

    def repeated(part: np.ndarray, count: int) -> np.ndarray:
        if count % part.shape[-1]:
            raise ValueError(f"{part.shape[-1]} groups of inputs cannot be divided into {count}")
        return np.repeat(part, count // part.shape[-1], axis=-1)

    def levels(inner: np.ndarray | None, above: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if inner is None:
            above = np.zeros((*codes.shape[:-1], 1), np.float16)
        if above is None:
            inner, above = None, inner
        ones = np.ones((*codes.shape[:-1], 1), np.int8)
        return repeated(ones if inner is None else inner, groups), repeated(above, outer)

    scale, outer_scale = levels(matrix.scale, matrix.outer_scale)
    minimum, outer_minimum = levels(matrix.minimum, matrix.outer_minimum)
    return StoredMatrix(codes, scale, minimum, outer_scale, outer_minimum)


def quantize(weight: Float[Array, "*L O I"], bits: int, group: int = INPUTS) -> StoredMatrix:
    """A matrix rounded to blocks: 8 bits with a scale, or 4 bits with a scale and a minimum.

    By numpy, with scales in float16, as the CPU's kernel reads them; or traceable, with those that a TPU has.

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
        # A scale of all inputs multiplies their sum, in float32: see `row_operations.xla_product`.
        scale = (xp.abs(grouped).max(axis=-1) / 127).astype(np.float16 if xp is np else np.float32)
        codes = xp.clip(xp.round(_quotient(grouped, scale)), -127, 127).astype(np.int8)
        return StoredMatrix(codes.reshape(weight.shape), scale)
    # Codes are those of the rounded scale and minimum.
    dtype = np.float16 if xp is np else jnp.bfloat16
    minimum = grouped.min(axis=-1).astype(dtype)
    scale = ((grouped.max(axis=-1) - minimum.astype(np.float32)) / 15).astype(dtype)
    codes = xp.clip(xp.round(_quotient(grouped - minimum.astype(np.float32)[..., None], scale)), 0, 15)
    codes = codes.astype(np.uint8).reshape(*outputs, -1, INPUTS)
    pairs = codes[..., : INPUTS // 2] | codes[..., INPUTS // 2 :] << 4
    return StoredMatrix(pairs.reshape(*outputs, -1), scale, minimum, bits=4)


def _quotient(grouped: Array, scale: Array) -> Array:
    xp, scale = np if isinstance(grouped, np.ndarray) else jnp, scale.astype(np.float32)[..., None]
    return xp.where(scale == 0, np.float32(0), grouped / xp.where(scale == 0, np.float32(1), scale))


def with_scales_for(matrix: StoredMatrix, inputs: int) -> StoredMatrix:
    """The matrix, of numpy's arrays, with scales so fine that parts of so many inputs have theirs.

    Raises:
      ValueError: a group of inputs would be divided.
    """
    is_per_output = matrix.scale.shape[-1] == 1
    group = INPUTS if is_per_output else max(matrix.group, INPUTS)  # codes 16 + i share bytes with codes i
    if inputs % group and not (is_per_output and matrix.bits == 8):
        raise ValueError(f"groups of {group} inputs cannot be divided into parts of {inputs}")

    def finer(part: np.ndarray) -> np.ndarray:
        size = matrix.shape[-1] // part.shape[-1]
        return np.repeat(part, size // math.gcd(size, inputs), axis=-1)

    return dataclasses.replace(matrix, **matrix.scales(finer))
