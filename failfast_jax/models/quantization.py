"""Rounding of a model's matrices to blocks of 8 or 4 bits (`kernels.blocks`), and their layout on this machine.

Norms and biases stay in the model's dtype, and so does all arithmetic but that of products.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from failfast_jax.errors import OptionError
from failfast_jax.kernels import blocks
from failfast_jax.kernels.blocks import GROUP, INPUTS, BlockMatrix
from failfast_jax.models.layers import Linear
from failfast_jax.models.sharding import part_place, transposed_specs, whole
from failfast_jax.util.hardware import array_bytes

SCHEMES = {"int8": 8, "int4": 4}
"""Bits by scheme: symmetric 8 bits; 4 bits with a minimum beside the scale. On a CPU with the kernel each 32 inputs
have a scale; elsewhere, where XLA multiplies, 8 bits have one for an output, and 4 bits one for 128 inputs, or as many
as divide those of a device."""


AS_STORED = "none"
"""What `--quantize-drafter` may say instead."""


def check(scheme: str | None, flag: str = "--quantize", *others: str) -> None:
    """Raises OptionError: a scheme that is neither known nor one of `others`."""
    if scheme is not None and scheme not in (*SCHEMES, *others):
        raise OptionError(f"{flag} {scheme}: must be one of {', '.join((*SCHEMES, *others))}")


def drafter_scheme(target: Any) -> str | None:
    """The scheme of a drafter that is read for a target, unless the user names one: 8 bits if the target is in tiles.

    Such a target's step takes as long as its bytes are many, and so does a draft; of the text nothing changes.
    """
    leaves = jax.tree.leaves(target, is_leaf=lambda leaf: isinstance(leaf, BlockMatrix))
    return "int8" if any(isinstance(leaf, BlockMatrix) and leaf.is_tiled for leaf in leaves) else None


def refusal(activations: str | None) -> str | None:
    """Returns why an arithmetic cannot be had on this machine, or None."""
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    if activations != "int8":
        return None
    return "for CPUs only" if jax.default_backend() != "cpu" else cpu_blocks.supports(inputs=INPUTS)


def converter(scheme: str) -> Callable[[str, jax.Array | BlockMatrix], jax.Array | BlockMatrix]:
    """For `checkpoints.checkpoint`: what is kept of a decoder's parameter that has just been read, by its name."""

    def convert(name: str, value: jax.Array | BlockMatrix) -> jax.Array | BlockMatrix:
        is_matrix = name in ("embed", "head.weight") or (name.endswith(".weight") and value.ndim > 1)
        return rounded(value, scheme) if is_matrix else value

    return convert


def rounded(weight: Any, scheme: str, activations: str | None = None) -> Any:
    """A matrix in blocks; as it is where it is so already, or where its inputs do not divide into blocks.

    Returns once it is there: devices exchange maxima, and two exchanges at once can lock each other out.

    Args:
      weight: an array, or an abstract one, which is meant for a device without the CPU's kernel.
      activations: see `laid_out`.
    """
    if isinstance(weight, BlockMatrix):
        return weight
    bits, inputs, abstract = SCHEMES[scheme], weight.shape[-1], isinstance(weight, jax.ShapeDtypeStruct)
    if not abstract and len(weight.devices()) == 1 and _has_kernel(inputs):
        return laid_out(blocks.rounded(np.asarray(weight), bits), activations)  # nothing is compiled
    local = inputs if weight.sharding is None else weight.sharding.shard_shape(weight.shape)[-1]
    group = inputs if bits == 8 else math.gcd(local, GROUP)
    if bits == 4 and group % INPUTS:
        return weight
    rounds, placed = rounder(weight, bits, group)
    return for_xla(placed if abstract else jax.block_until_ready(rounds(weight)))


def for_xla(matrix: Any) -> Any:
    """A matrix as XLA multiplies by it (`blocks.transposed`), each device's part where it lies.

    Args:
      matrix: in blocks, of arrays or abstract ones; anything else stays as it is, and so do blocks that XLA multiplies
        by as they are.
    """
    if not isinstance(matrix, BlockMatrix) or matrix.is_tiled or matrix.output_axes or blocks.has_one_scale(matrix):
        return matrix
    abstract = isinstance(matrix.codes, jax.ShapeDtypeStruct)
    # Compiled for a CPU, JAX 0.10's programs refuse their own arrays of 4 bits.
    in_pairs = abstract or jax.default_backend() != "cpu"
    change, place = functools.partial(blocks.transposed, in_pairs=in_pairs), matrix.codes.sharding
    shapes = jax.eval_shape(change, matrix)
    if isinstance(place, NamedSharding):
        specs, after = jax.tree.map(lambda part: part.sharding.spec, matrix), transposed_specs(place.spec, shapes)
        change = jax.shard_map(change, mesh=place.mesh, in_specs=(specs,), out_specs=after, check_vma=False)
        places = jax.tree.map(functools.partial(NamedSharding, place.mesh), after)
        shapes = jax.tree.map(lambda part, place: part.update(sharding=place), shapes, places)
    return shapes if abstract else jax.block_until_ready(jax.jit(change)(matrix))


def rounder(weight: Any, bits: int, group: int) -> tuple[Callable[[jax.Array], BlockMatrix], BlockMatrix]:
    """The compiled rounding of matrices of a shape and place, and its result's shapes and places."""
    function = functools.partial(blocks.rounded, bits=bits, group=group)
    placed = jax.tree.map(functools.partial(_placed_like, weight.sharding), jax.eval_shape(function, weight))
    return jax.jit(function, out_shardings=jax.tree.map(lambda part: part.sharding, placed)), placed


def _placed_like(place: Any, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An abstract part of a matrix that is spread as its numbers were."""
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=part_place(place, part.shape))


def _has_kernel(inputs: int) -> bool:
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    return jax.default_backend() == "cpu" and cpu_blocks.supports(inputs=inputs) is None


def with_rounded_matrices(module: Any, scheme: str, activations: str | None = None) -> Any:
    """A module with the weight of every `Linear` in it rounded; arrays, or abstract ones."""

    def change(node: Any) -> Any:
        if not isinstance(node, Linear):
            return node
        node = copy.copy(node)
        node.weight = node.weight.replace(rounded(node.weight.get_value(), scheme, activations))
        return node

    return jax.tree.map(change, module, is_leaf=lambda node: isinstance(node, Linear))


def with_matrices_for_xla(model: Any) -> Any:
    """A model with each of its matrices in blocks as `for_xla`."""
    return jax.tree.map(for_xla, model, is_leaf=lambda node: isinstance(node, BlockMatrix))


def chosen(matrix: Float[Array, "O I"] | BlockMatrix, rows: np.ndarray) -> Float[Array, "R I"] | BlockMatrix:
    """Some rows of a matrix, in the same form."""
    if isinstance(matrix, BlockMatrix):
        host = matrix.with_arrays(np.asarray) if matrix.is_tiled else matrix
        return laid_out(host.chosen(rows), matrix.activations)
    return _take(whole(matrix), rows)


_take = jax.jit(lambda matrix, rows: matrix[rows])


def laid_out(matrix: BlockMatrix, activations: str | None = None) -> BlockMatrix:
    """A matrix as one device computes with it: in tiles, where the CPU's kernel takes them, or else as XLA does.

    Args:
      activations: one of `cpu_blocks.ACTIVATIONS`; None: int8 where the kernel serves it.
    """
    if matrix.is_tiled or matrix.output_axes:
        return matrix
    if not _has_kernel(matrix.shape[-1]):
        return for_xla(matrix.with_arrays(jax.device_put))
    host = matrix.with_arrays(np.asarray, activations=activations or "int8")
    return blocks.tiled(host).with_arrays(jax.device_put)


def parameter_bytes(model: Any) -> int:
    """Bytes of all parameters, however many devices hold them."""
    return sum(map(array_bytes, jax.tree.leaves(model)))
