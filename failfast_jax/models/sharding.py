"""Tensor and data parallelism as data: the logical axes of every array, and the mesh axis each of them is spread over.

The layers of a model run under `shard_map`: each device computes its heads and its part of the MLP, and the two
sums over devices in a layer are the only traffic. Embedding and head are spread by vocabulary. What a round keeps
beside the caches is small and the same on all devices.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from failfast_jax.errors import OptionError
from failfast_jax.kernels.blocks import TransposedMatrix
from failfast_jax.kernels.kernel_table import KERNELS, SIMULATED_TPU, TPU_KERNELS, device_of, kernel_of
from failfast_jax.models.model_config import ModelConfig

Axis = str | None
"""Mesh axis that a dimension of an array is spread over."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """Kernel and devices of a model; static, part of the key of every compilation.

    Attributes:
      kernel: one of `kernel_table.KERNELS`; None chooses by platform.
      mesh: devices that the model is spread over; None for one device.
      batch: mesh axis of the batch; None: every device has the whole batch.
      heads: mesh axis of the KV heads; None: every device computes all of them.
      mlp: mesh axis of the MLP's inner features; None: every device computes all of them.
      vocab: mesh axis of the rows of embedding and head; None: every device has all of them.
    """

    kernel: str | None = None
    mesh: Mesh | None = None
    batch: str | None = None
    heads: Axis = None
    mlp: Axis = None
    vocab: Axis = None

    def __post_init__(self) -> None:
        if self.kernel is not None and self.kernel not in KERNELS:
            raise ValueError(f"attention kernel {self.kernel!r}: must be one of {', '.join(KERNELS)}")

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: the one that widths and defaults are for."""
        return device_of(self.kernel).platform

    def resolved(self, dtype: DTypeLike, head_dim: int) -> str:
        """The kernel to use for a model."""
        if self.kernel not in (None, SIMULATED_TPU):
            return self.kernel
        kernel = kernel_of(device_of(self.kernel), dtype, head_dim)
        return self.kernel if self.kernel and kernel == "tpu" else kernel

    def tpu_shapes(self, dtype: DTypeLike, head_dim: int) -> bool:
        """True if a model's windows and caches need the shapes and the layout that the TPU's kernels take."""
        return self.resolved(dtype, head_dim) in TPU_KERNELS

    def per_device(self, function: Callable, specs: Any, out_specs: Any) -> Callable:
        """`function` over each device's part of its arguments; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def rows_spec(self, width: int) -> P:
        """The sharding of `[B, W, ...]` arrays: rows over the devices of a group, if there are as many for each."""
        if self.mesh is None:
            return P(None, None)
        return P(self.batch, TENSOR if width % self.parts(TENSOR) == 0 else None)

    def parts(self, axis: Axis) -> int:
        """The number of devices along a mesh axis; 1 if there is none."""
        return 1 if self.mesh is None or axis is None else self.mesh.shape[axis]


ONE_DEVICE = Execution()


def on_every_device(method: Callable) -> Callable:
    """A method of a module that each device of its mesh computes whole: for drafters, which are small."""

    @functools.wraps(method)
    def run(self, *arguments):
        return self.execution.per_device(method, P(), P())(self, *arguments)

    return run


Block = tuple[tuple[int, int], ...]
"""A part of an array: where it begins and ends along each axis."""
Blocks = Mapping[Block, np.ndarray]

DATA, TENSOR = "data", "tensor"
"""Mesh axes: of the batch, and of everything else."""

LOGICAL_AXES = (
    (r"(embed|head\.weight)\b", ("vocab",)),
    (r"attention\.qkv\.", ("heads",)),
    (r"attention\.o\.weight\b", (None, "heads")),
    (r"mlp\.gate_up\.", (None, "mlp")),
    (r"mlp\.down\.weight\b", (None, "mlp")),
    (r".*(norm|bias|mask_row).*", ()),
)
"""Names of parameters, and the logical axis of each of their first dimensions: fields of `Execution`."""


def parameter_spec(name: str, execution: Execution) -> P:
    """The sharding of a parameter; `name` is its path, joined by dots."""
    for pattern, axes in LOGICAL_AXES:
        if re.search(pattern, name):
            return P(*(axis and getattr(execution, axis) for axis in axes))
    raise ValueError(f"sharding.LOGICAL_AXES says nothing about the parameter {name}")


def parameter_specs(module: Any, execution: Execution) -> Any:
    """`module` with a `PartitionSpec` in the place of each parameter; None on one device."""
    if execution.mesh is None:
        return None

    def is_transposed(node: Any) -> bool:
        return isinstance(node, TransposedMatrix)

    def spec(path: Sequence[Any], leaf: Any) -> Any:
        axes = parameter_spec(name_of(path), execution)
        return transposed_specs(axes, leaf) if is_transposed(leaf) else axes

    return jax.tree_util.tree_map_with_path(spec, module, is_leaf=is_transposed)


def transposed_specs(axes: P, matrix: TransposedMatrix) -> TransposedMatrix:
    """The sharding of each array of a transposed matrix; `axes`: that of its numbers `[*L, O, I]`."""
    inputs = axes[matrix.output_axes] if len(axes) > matrix.output_axes else None
    outputs = next((axis for axis in axes[: matrix.output_axes] if axis), None)
    return jax.tree.map(lambda part: P(inputs, *[None] * (part.ndim - 2), outputs), matrix)


def name_of(path: Sequence[Any]) -> str:
    """A parameter's name from its path in a pytree of modules."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
    return ".".join(part for part in parts if part not in ("", "value"))


def total(x: Float[Array, "*R E"], axis: Axis) -> Float[Array, "*R E"]:
    """Sum of the devices' parts along a mesh axis."""
    return x if axis is None else jax.lax.psum(x, axis)


def constrain(tree: Any, execution: Execution, spec: P) -> Any:
    """Tells XLA how arrays are spread; nothing on one device."""
    if execution.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(execution.mesh, spec))


def _block(part: tuple[slice, ...], shape: tuple[int, ...]) -> Block:
    return tuple(axis.indices(size)[:2] for axis, size in zip(part, shape))


def blocks_here(place: Sharding, shape: tuple[int, ...]) -> list[Block]:
    """The different blocks of an array that this process's devices hold."""
    parts = place.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(_block(part, shape) for part in parts))


def from_blocks(blocks: Blocks, place: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """An array of the blocks that `blocks_here` names; every process brings its own."""
    if len(blocks) == 1 and place.is_fully_addressable:
        return jax.device_put(next(iter(blocks.values())), place)
    return jax.make_array_from_callback(shape, place, lambda part: blocks[_block(part, shape)])


def put(value: ArrayLike, place: Sharding, name: str = "an array") -> jax.Array:
    """`jax.device_put` that sends nothing between processes: each has the whole value, or the parts of its devices.

    Raises:
      ValueError: the parts of a value are elsewhere than `place` has them; says `name`. See `whole`.
    """
    if place.is_fully_addressable:
        return jax.device_put(value, place)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if value.sharding.is_equivalent_to(place, value.ndim):
            parts = [shard.data for shard in value.addressable_shards]
            return jax.make_array_from_single_device_arrays(value.shape, place, parts)
        if not value.is_fully_replicated:
            raise ValueError(f"{name} {list(value.shape)}: parts on other processes are not sent")
        value = value.addressable_data(0)
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, place, lambda part: value[part])


def put_parameter(value: Any, mesh: Mesh, axes: P, name: str = "an array") -> Any:
    """`put` of an array or a transposed matrix; `axes`: the sharding of its numbers."""
    specs = transposed_specs(axes, value) if isinstance(value, TransposedMatrix) else axes
    return jax.tree.map(lambda part, spec: put(part, NamedSharding(mesh, spec), name), value, specs)


def whole(value: Array) -> Array:
    """All of an array on one device of this process; as it is if that is all there is (or while it is traced).

    Parts on other processes are sent, and waited for: two exchanges under way at once can lock each other out.
    """
    if isinstance(value, jax.core.Tracer) or value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        gather = jax.jit(jnp.copy, out_shardings=NamedSharding(value.sharding.mesh, P()))
        value = jax.block_until_ready(gather(value))
    return value.addressable_data(0)


def constrain_rows(tree: Any, execution: Execution) -> Any:
    """Tells XLA that arrays are spread like the batch, their leading axis, and otherwise whole on every device."""
    return jax.tree.map(lambda x: constrain(x, execution, P(execution.batch) if x.ndim else P()), tree)


def make_mesh(tensor: int = 1, data: int = 1, config: Callable[[], ModelConfig] | None = None) -> Mesh:
    """A mesh of the first `tensor * data` devices; of several processes, of all that they have together.

    Args:
      config: configuration of the model that is to be spread, for the advice in an error.

    Raises:
      OptionError: there are fewer, or some process would be left out.
    """
    count, processes = len(jax.devices()), jax.process_count()
    for flag, value in (("tensor", tensor), ("data", data)):
        if value < 1:
            raise OptionError(f"--{flag}-parallel {value}: must be at least 1")
    if tensor * data > count:
        platform = jax.default_backend()
        raise OptionError(
            f"--tensor-parallel {tensor} (x {data} data-parallel): there are {count} {platform} devices; "
            f"the product must be at most {count}"
        )
    if processes > 1 and tensor * data < count:
        raise OptionError(
            f"--tensor-parallel {tensor} (x {data} data-parallel): {processes} processes have {count} devices "
            f"together, and all take part{'' if config is None else f'; {_advice(config(), count)}'}"
        )
    return mesh_of(jax.devices()[: tensor * data], data)


def mesh_of(devices: Sequence[Any], data: int = 1) -> Mesh:
    """A mesh of the given devices, neighbours along the tensor axis."""
    grid = np.asarray(devices).reshape(data, -1)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def kv_copies(config: ModelConfig, tensor: int) -> int | None:
    """Copies of each KV head so that every device has one; None where the counts do not fit."""
    heads = config.num_kv_heads
    return 1 if heads % tensor == 0 else tensor // heads if tensor % heads == 0 else None


def _advice(config: ModelConfig, count: int) -> str:
    """Names the numbers of devices that divide a model."""
    fits = [n for n in range(1, count + 1) if kv_copies(config, n) and config.intermediate_size % n == 0]
    return f"tensor parallelism of this model takes {', '.join(map(str, fits))}"


def execution_of(config: ModelConfig, mesh: Mesh, *, drafter: bool = False, kernel: str | None = None) -> Execution:
    """The execution of a model on a mesh of `make_mesh`.

    What does not divide evenly stays whole on every device: the vocabulary of any model, the heads and the MLP of
    a drafter. A target's KV heads are copied until every device has one (`Decoder.with_execution`), and its query heads
    divided among the copies.

    Raises:
      OptionError: the target's heads or its MLP do not divide over the devices.
    """
    tensor, data = mesh.shape[TENSOR], mesh.shape[DATA]
    heads, mlp = kv_copies(config, tensor) is not None, config.intermediate_size % tensor == 0
    if not drafter and not (heads and mlp):
        uneven = f"{config.num_kv_heads} key and value heads"
        uneven = f"the MLP's {config.intermediate_size} features" if heads else uneven
        advice = _advice(config, max(mesh.size, len(jax.devices())))
        raise OptionError(
            f"--tensor-parallel {tensor}: {uneven} cannot be spread evenly over {tensor} devices; {advice}"
        )
    even = {"heads": heads, "mlp": mlp, "vocab": config.vocab_size % tensor == 0}
    axes = {name: TENSOR if tensor > 1 and fits else None for name, fits in even.items()}
    return Execution(kernel, mesh, batch=DATA if data > 1 else None, **axes)


def check_batch(batch: int, mesh: Mesh) -> None:
    """Raises OptionError: the data axis does not divide the batch."""
    if batch % (groups := mesh.shape[DATA]):
        raise OptionError(f"a batch of {batch} over {groups} data-parallel groups: must be a multiple of their number")


def placement(config: ModelConfig, mesh: Mesh, *, drafter: bool = False) -> Callable[[str, tuple[int, ...]], Any]:
    """The sharding of each parameter of a model as it is read: `checkpoints.checkpoint.Place`."""
    execution = execution_of(config, mesh, drafter=drafter)
    if kv_copies(config, execution.parts(execution.heads)) != 1:
        # Copied once they are all there.
        execution = dataclasses.replace(execution, heads=None)
    return lambda name, shape: NamedSharding(execution.mesh, parameter_spec(name, execution))
