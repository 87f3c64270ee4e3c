"""A model's matrices in blocks: laid out for its devices, rounded to 8 or 4 bits, and what they compute and take.

Norms and biases stay in the model's dtype, and so does all arithmetic but that of products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Array, Float

from failfast_jax.errors import OptionError
from failfast_jax.kernels import blocks
from failfast_jax.kernels.blocks import GROUP, INPUTS, TILE, BlockMatrix, StoredMatrix, TiledMatrix, TransposedMatrix
from failfast_jax.models.sharding import name_of, transposed_specs, whole
from failfast_jax.util.hardware import array_bytes, bytes_on_a_device

SCHEMES = {"int8": 8, "int4": 4}
"""Bits by scheme: symmetric 8 bits; 4 bits with a minimum beside the scale. On a CPU with the kernel each 32 inputs
have a scale; elsewhere, where XLA multiplies, 8 bits have one for all inputs of an output that a device holds, and 4
bits one for 128 inputs, or as many as divide those of a device."""


AS_STORED = "none"
"""What `--quantize-drafter` may say instead."""


def check(scheme: str | None, flag: str = "--quantize", *others: str) -> None:
    """Raises OptionError: a scheme that is neither known nor one of `others`."""
    if scheme is not None and scheme not in (*SCHEMES, *others):
        raise OptionError(f"{flag} {scheme}: must be one of {', '.join((*SCHEMES, *others))}")


def check_activations(activations: str | None) -> None:
    """Raises OptionError: this machine cannot compute in an arithmetic."""
    if activations is None:
        return
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    reason = None if jax.default_backend() == "cpu" else "for CPUs only"
    if reason is None and activations == "int8":
        reason = cpu_blocks.refusal(INPUTS)
    if reason is not None:
        raise OptionError(f"--activations {activations}: {reason}: leave it out")


def drafter_scheme(wanted: str | None, target: Any | None) -> str | None:
    """The scheme of a drafter: the one that the user wants, or else 8 bits if it is read for a target in tiles.

    Decoding time is proportional to the bytes that are read, so the drafter is rounded, too. No text depends on it.

    Args:
      wanted: one of `SCHEMES`, `AS_STORED` or None.
      target: None for a drafter that is not read.
    """
    if wanted is not None:
        return None if wanted == AS_STORED else wanted
    return "int8" if any(isinstance(matrix, TiledMatrix) for matrix in _matrices(target)) else None


# -- layouts -----------------------------------------------------------------------------------------------


def laid_out(matrix: Any, scheme: str | None = None) -> Any:
    """A matrix as its devices multiply by it: in tiles for the CPU's kernel, or else transposed for XLA.

    Blocks until the arrays are on their devices: two exchanges of devices at once can lock each other out.

    Args:
      matrix: in blocks, or floats that are rounded; in arrays, or abstract ones: for accelerators unless placed here.
      scheme: one of `SCHEMES` for floats, which stay where 4 bits do not divide their inputs into blocks.
    """
    if isinstance(matrix, TiledMatrix | TransposedMatrix):
        return matrix
    bits, part = SCHEMES.get(scheme), jax.tree.leaves(matrix)[0]
    is_abstract, is_cpu = isinstance(part, jax.ShapeDtypeStruct), jax.default_backend() == "cpu"
    devices = set() if part.sharding is None else part.sharding.device_set
    platforms = {device.platform for device in devices}
    if is_abstract and bits and platforms == {"cpu"} and _reason(matrix) is None:
        *leading, outputs, inputs = matrix.shape
        last = blocks.tile(blocks.quantize(np.zeros((outputs % TILE or TILE, inputs), np.float32), bits))
        tiles = (*leading, -(-outputs // TILE))
        return last.with_arrays(lambda part: jax.ShapeDtypeStruct((*tiles, *part.shape[1:]), part.dtype))
    if is_cpu and not is_abstract and _reason(matrix) is None:
        host = jax.tree.map(np.asarray, matrix)
        stored = host if isinstance(host, StoredMatrix) else blocks.quantize(host, bits)
        return blocks.tile(stored).with_arrays(jax.device_put)
    local = matrix.shape[-1] if part.sharding is None else part.sharding.shard_shape(matrix.shape)[-1]
    group = local if bits == 8 else math.gcd(local, GROUP)
    if not isinstance(matrix, StoredMatrix) and group % INPUTS and bits == 4:
        return matrix
    # Compiled for a CPU, JAX 0.10's programs refuse their own arrays of 4 bits.
    in_words = local % GROUP == 0 and platforms == {"tpu"}
    change = _transposing(bits, group, part.sharding, in_pairs=is_abstract or not is_cpu, in_words=in_words)
    if not is_abstract:
        return jax.block_until_ready(change(matrix))
    shapes = jax.eval_shape(change, matrix)
    if not isinstance(part.sharding, NamedSharding):
        return shapes
    specs = transposed_specs(part.sharding.spec, shapes)
    return jax.tree.map(lambda x, spec: x.update(sharding=NamedSharding(part.sharding.mesh, spec)), shapes, specs)


@functools.lru_cache
def _transposing(bits: int | None, group: int, place: Sharding | None, **form: bool) -> Callable[[Any], Any]:
    """The compiled rounding and transposition of matrices, each device's part by itself."""

    def change(part: Any) -> TransposedMatrix:
        stored = part if isinstance(part, StoredMatrix) else blocks.quantize(part, bits, group)
        return blocks.transpose(stored, **form)

    def on_devices(matrix: Any) -> TransposedMatrix:
        specs = transposed_specs(place.spec, jax.eval_shape(change, matrix))
        return jax.shard_map(change, mesh=place.mesh, in_specs=place.spec, out_specs=specs, check_vma=False)(matrix)

    return jax.jit(on_devices if isinstance(place, NamedSharding) else change)


def convert(name: str, value: Any, scheme: str | None) -> Any:
    """A parameter of a model: matrices laid out if they are in blocks, or rounded if there is a scheme."""
    is_stored = isinstance(value, StoredMatrix)
    return laid_out(value, scheme) if is_stored or (scheme and _is_matrix(name, value)) else value


def quantized(model: Any, scheme: str, keep: tuple[str, ...] = ()) -> Any:
    """A model, abstract or not, with its matrices in blocks; those that are so already stay as they are.

    Args:
      keep: names of parameters that stay, too.

    Raises:
      OptionError: see `check`.
    """
    check(scheme)

    def change(path: Any, value: Any) -> Any:
        return value if (name := name_of(path)) in keep else convert(name, value, scheme)

    return jax.tree_util.tree_map_with_path(change, model, is_leaf=_is_blocks)


def take_rows(matrix: Float[Array, "O I"] | BlockMatrix, rows: np.ndarray) -> Float[Array, "R I"] | BlockMatrix:
    """Some rows of a matrix, in the same layout."""
    if isinstance(matrix, TiledMatrix):
        tiles = blocks.tile(matrix.with_arrays(np.asarray).take_rows(rows))
        return dataclasses.replace(tiles.with_arrays(jax.device_put), activations=matrix.activations)
    if isinstance(matrix, TransposedMatrix):
        return matrix.with_arrays(whole).take_rows(rows)
    return _take(whole(matrix), rows)


_take = jax.jit(lambda matrix, rows: matrix[rows])


def check_layout(model: Any, spread: Any = None) -> None:
    """Raises OptionError: a matrix of a model in memory is in tiles, or was transposed where it was spread otherwise.

    Outputs of several axes that have become one are in another order where the second axis is spread.

    Args:
      spread: the model as it is going to be spread; None: to look for tiles only.
    """
    for before, after in zip(_matrices(model), _matrices(model if spread is None else spread)):
        is_transposed = isinstance(before, TransposedMatrix) and before.output_axes > 1
        moved = is_transposed and not after.codes.sharding.is_equivalent_to(before.codes.sharding, before.codes.ndim)
        if isinstance(before, TiledMatrix) or moved:
            raise OptionError(
                "--tensor-parallel, --data-parallel: the quantised model in memory was read for other devices: "
                "give its path"
            )


# -- what a model computes in, and what it takes ---------------------------------------------------------


def with_activations(models: Mapping[str, Any], activations: str | None) -> dict[str, Any]:
    """Models by role, their matrices in blocks multiplied as `--activations` says; None: as they are.

    Raises:
      OptionError: no matrix is in blocks, or this machine multiplies one in another arithmetic.
    """
    if activations is None:
        return dict(models)

    def change(node: Any) -> Any:
        return dataclasses.replace(node, activations=activations) if isinstance(node, TiledMatrix) else node

    changed = {name: jax.tree.map(change, model, is_leaf=_is_blocks) for name, model in models.items()}
    held = [(name, model, m) for name, model in changed.items() for m in filter(_is_blocks, _matrices(model))]
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


def without_kernel(model: Any) -> str | None:
    """Returns why XLA multiplies matrices in blocks of a model on a CPU; None if none, or another device."""
    left = [matrix for matrix in _matrices(model) if isinstance(matrix, TransposedMatrix)]
    if jax.default_backend() != "cpu" or not left:
        return None
    return "; ".join(sorted({_reason(matrix) or "a layout for accelerators" for matrix in left}))


def _reason(matrix: Any) -> str | None:
    """Why the CPU's kernel cannot multiply by a matrix, in blocks or not yet; None: it can."""
    from failfast_jax.kernels import cpu_blocks  # brings LLVM

    if len(jax.tree.leaves(matrix)[0].sharding.device_set) > 1:
        return "matrices spread over devices"
    return cpu_blocks.refusal(matrix.shape[-1], matrix if _is_blocks(matrix) else None)


def _is_blocks(node: Any) -> bool:
    return isinstance(node, BlockMatrix)


def _is_matrix(name: str, value: Any) -> bool:
    """True for the embedding, and for the weight of a product."""
    if _is_blocks(value):
        return True
    *modules, leaf = name.split(".")
    return value.ndim > 1 and leaf in ("embed", "head", "weight") and not "".join(modules[-1:]).endswith("norm")


def _matrices(model: Any) -> list[Any]:
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_blocks)
    return [leaf for path, leaf in leaves if _is_matrix(name_of(path), leaf)]


def is_in_tiles(module: Any) -> bool:
    """True if the CPU's kernel multiplies by each matrix."""
    return all(isinstance(matrix, TiledMatrix) for matrix in _matrices(module))


def _activations(model: Any, matrix: BlockMatrix) -> str:
    return matrix.activations if isinstance(matrix, TiledMatrix) else str(model.dtype)


def arithmetic(model: Any) -> str:
    """Forms of a model's matrices, and of what they are multiplied by: `4 and 8-bit blocks, int8 activations`."""
    matrices = _matrices(model)
    in_blocks = [matrix for matrix in matrices if _is_blocks(matrix)]
    floats = {str(matrix.dtype) for matrix in matrices if not _is_blocks(matrix)}
    activations = {_activations(model, matrix) for matrix in in_blocks} | ({str(model.dtype)} if floats else set())
    named = {"-bit blocks": {str(matrix.bits) for matrix in in_blocks}, " weights": floats, " activations": activations}
    return ", ".join(f"{' and '.join(sorted(kinds))}{word}" for word, kinds in named.items() if kinds)


def parameter_bytes(model: Any, target: Any = None) -> int:
    """Bytes of all parameters, however many devices hold them; without those that a drafter shares with its target."""
    shared = {id(leaf) for leaf in jax.tree.leaves(target)}
    return sum(array_bytes(leaf) for leaf in jax.tree.leaves(model) if id(leaf) not in shared)


def summary(model: Any, stored_bytes: int, target: Any = None) -> str:
    """A line on a model's memory and arithmetic; see `parameter_bytes`."""
    run = parameter_bytes(model, target)
    return f"{stored_bytes / 1e6:.0f} MB as stored, {run / 1e6:.0f} MB as run; {arithmetic(model)}"


def smaller_layouts(models: Mapping[str, Any], needed: int) -> dict[str, int]:
    """Bytes on each device, `needed` now, by the flags under which they are fewer: `--quantize int8`.

    Args:
      models: by the flag that rounds their matrices; or parameters by name; or None.
    """
    layouts = {}
    for flag, model in models.items():
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model)
        rounded = getattr(abstract, "quantized", functools.partial(quantized, abstract))
        for scheme in SCHEMES:
            layouts[f"{flag} {scheme}"] = needed + bytes_on_a_device(rounded(scheme)) - bytes_on_a_device(abstract)
    return {flag: size for flag, size in layouts.items() if size < needed}
