"""Rounding of a model's matrices to blocks of 8 or 4 bits (`kernels.blocks`), and their layout on this machine.

Norms and biases stay in the model's dtype, and so does all arithmetic but that of products.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from failfast_jax.errors import OptionError
from failfast_jax.kernels import blocks
from failfast_jax.kernels.blocks import GROUP, INPUTS, BlockMatrix
from failfast_jax.models.layers import Linear
from failfast_jax.models.sharding import name_of, part_place, transposed_specs, whole
from failfast_jax.util.hardware import array_bytes, bytes_on_a_device

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


def drafter_scheme(wanted: str | None, target: Any | None) -> str | None:
    """The scheme of a drafter: the one that the user wants, or else 8 bits if it is read for a target in tiles.

    Decoding time is proportional to the bytes that are read, so the drafter is rounded, too. No text depends on it.

    Args:
      wanted: one of `SCHEMES`, `AS_STORED` or None.
      target: None for a drafter that is not read.
    """
    if wanted is not None:
        return None if wanted == AS_STORED else wanted
    leaves = jax.tree.leaves(target, is_leaf=lambda leaf: isinstance(leaf, BlockMatrix))
    return "int8" if any(isinstance(leaf, BlockMatrix) and leaf.is_tiled for leaf in leaves) else None


def refusal(activations: str | None, is_spread: bool = False) -> str | None:
    """Returns why this machine, or several devices of it (`is_spread`), cannot compute in an arithmetic, or None."""
    if activations is None:
        return None
    if jax.default_backend() != "cpu":
        return "for CPUs only"
    return _no_kernel(INPUTS, is_spread) if activations == "int8" else None


def _no_kernel(inputs: int, is_spread: bool) -> str | None:
    """Why XLA multiplies a matrix in blocks on a CPU, or None if the kernel does."""
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    return "matrices spread over devices" if is_spread else cpu_blocks.supports(inputs=inputs)


def converter(scheme: str) -> Callable[[str, Any], Any]:
    """For `checkpoints.checkpoint`: what is kept of a decoder's parameter that has just been read, by its name."""

    def convert(name: str, value: Any) -> Any:
        is_matrix = name in ("embed", "head.weight") or (name.endswith(".weight") and value.ndim > 1)
        return rounded(value, scheme) if is_matrix else value

    return convert


def rounded(weight: Any, scheme: str) -> Any:
    """A matrix in blocks; as it is where it is so already, or where its inputs do not divide into blocks.

    Returns once it is there: devices exchange maxima, and two exchanges at once can lock each other out.

    Args:
      weight: an array, or an abstract one, which is meant for a device without the CPU's kernel.
    """
    if isinstance(weight, BlockMatrix):
        return weight
    bits, inputs, abstract = SCHEMES[scheme], weight.shape[-1], isinstance(weight, jax.ShapeDtypeStruct)
    if not abstract and len(weight.devices()) == 1 and _has_kernel(inputs):
        return laid_out(blocks.rounded(np.asarray(weight), bits))  # nothing is compiled
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


def with_rounded_matrices(module: Any, scheme: str) -> Any:
    """A module with the weight of every `Linear` in it rounded; arrays, or abstract ones."""

    def change(node: Any) -> Any:
        if not isinstance(node, Linear):
            return node
        node = copy.copy(node)
        node.weight = node.weight.replace(rounded(node.weight.get_value(), scheme))
        return node

    return jax.tree.map(change, module, is_leaf=lambda node: isinstance(node, Linear))


def with_matrices_for_xla(model: Any) -> Any:
    """A model with each of its matrices in blocks as `for_xla`."""
    return jax.tree.map(for_xla, model, is_leaf=lambda node: isinstance(node, BlockMatrix))


def without_tiles(model: Any, tensor: int) -> Any:
    """A model with none of its matrices in tiles, as they are spread over `tensor` devices that share a layer.

    Raises:
      OptionError: a matrix is laid out for one device: its several axes of outputs, which are one, cannot be divided.
    """

    def change(node: Any) -> Any:
        if _is_blocks(node) and node.output_axes > 1 and tensor > 1 and len(node.codes.devices()) == 1:
            raise OptionError(f"--tensor-parallel {tensor}: the quantised model was read for one device; give its path")
        return blocks.untiled(node) if _is_blocks(node) else node

    return jax.tree.map(change, model, is_leaf=_is_blocks)


def chosen(matrix: Float[Array, "O I"] | BlockMatrix, rows: np.ndarray) -> Float[Array, "R I"] | BlockMatrix:
    """Some rows of a matrix, in the same form."""
    if isinstance(matrix, BlockMatrix):
        host = matrix.with_arrays(np.asarray if matrix.is_tiled else whole)
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
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    if not _has_kernel(matrix.shape[-1]) or cpu_blocks.refuses(matrix):
        return for_xla(matrix.with_arrays(jax.device_put))
    host = matrix.with_arrays(np.asarray, activations=activations or "int8")
    return blocks.tiled(host).with_arrays(jax.device_put)


def parameter_bytes(model: Any, target: Any = None) -> int:
    """Bytes of all parameters, however many devices hold them; without those that a drafter shares with its target."""
    shared = {id(leaf) for leaf in jax.tree.leaves(target)}
    return sum(array_bytes(leaf) for leaf in jax.tree.leaves(model) if id(leaf) not in shared)


# -- what a model computes in, and what it takes ---------------------------------------------------------


def with_activations(models: Mapping[str, Any], activations: str | None) -> dict[str, Any]:
    """Models by role, their matrices in blocks multiplied as `--activations` says; None: as they are.

    Raises:
      OptionError: no matrix is in blocks, or this machine multiplies one in another arithmetic.
    """
    if activations is None:
        return dict(models)

    def change(node: Any) -> Any:
        is_tiled = isinstance(node, BlockMatrix) and node.is_tiled
        return dataclasses.replace(node, activations=activations) if is_tiled else node

    changed = {name: jax.tree.map(change, model, is_leaf=_is_blocks) for name, model in models.items()}
    held = [(name, model, m) for name, model in changed.items() for m in _matrices(model) if _is_blocks(m)]
    if not held:
        raise OptionError(
            f"--activations {activations}: no matrix of the {' or the '.join(models)} is quantised; leave it out, or "
            "add --quantize int8 or int4"
        )
    for name, model, matrix in held:
        if (actual := _activations(model, matrix)) != activations:
            reason = f"{name}: {without_kernel(model)}; XLA multiplies in {actual}"
            raise OptionError(f"--activations {activations}: {reason}: leave it out")
    return changed


def _is_blocks(node: Any) -> bool:
    return isinstance(node, BlockMatrix)


def _matrices(model: Any) -> list[jax.Array | BlockMatrix]:
    """The embedding and the weights of all products, those of a model in blocks as such."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_blocks)
    named = ((name_of(path), leaf) for path, leaf in leaves if leaf.ndim > 1)
    return [leaf for name, leaf in named if name.split(".")[-1] in ("embed", "head", "weight")]


def _activations(model: Any, matrix: BlockMatrix) -> str:
    return matrix.activations if matrix.is_tiled else str(model.dtype)


def arithmetic(model: Any) -> str:
    """Forms of a model's matrices, and of what they are multiplied by: `4 and 8-bit blocks, int8 activations`."""
    matrices = _matrices(model)
    in_blocks = [matrix for matrix in matrices if _is_blocks(matrix)]
    floats = {str(matrix.dtype) for matrix in matrices if not _is_blocks(matrix)}
    activations = {_activations(model, matrix) for matrix in in_blocks} | ({str(model.dtype)} if floats else set())
    named = {"-bit blocks": {str(matrix.bits) for matrix in in_blocks}, " weights": floats, " activations": activations}
    return ", ".join(f"{' and '.join(sorted(kinds))}{word}" for word, kinds in named.items() if kinds)


def summary(model: Any, stored_bytes: int, target: Any = None) -> str:
    """A line on a model's memory and arithmetic; see `parameter_bytes`."""
    run = parameter_bytes(model, target)
    return f"{stored_bytes / 1e6:.0f} MB as stored, {run / 1e6:.0f} MB as run; {arithmetic(model)}"


def without_kernel(model: Any) -> str | None:
    """Returns why XLA multiplies matrices in blocks of a model on a CPU; None if none, or another device."""
    left = [matrix for matrix in _matrices(model) if _is_blocks(matrix) and not matrix.is_tiled]
    if jax.default_backend() != "cpu" or not left:
        return None
    reasons = {_no_kernel(matrix.shape[-1], len(matrix.codes.sharding.device_set) > 1) for matrix in left}
    return "; ".join(sorted(reasons - {None}))


def savings(model: Any) -> dict[str, int]:
    """Bytes that each device saves under the schemes by which a model takes less, computed from its shapes."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model)
    saved = {scheme: bytes_on_a_device(model) - bytes_on_a_device(abstract.quantized(scheme)) for scheme in SCHEMES}
    return {scheme: number for scheme, number in saved.items() if number > 0}
