"""Tensor and data parallelism as data: the logical axes of every array, and the mesh axis each of them is spread over.

The layers of a model run under `shard_map`: each device computes its heads and its part of the MLP, and the two
sums over devices in a layer are the only traffic. Embedding and head are spread by vocabulary. What a round keeps
beside the caches is small and the same on all devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from failfast_jax.errors import OptionError
from failfast_jax.kernels.kernel_table import KERNELS, SIMULATED_TPU, TPU_KERNELS, device_of, kernel_of
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.util import hardware

Axes = str | tuple[str, ...] | None
"""Mesh axes that a dimension of an array is spread over."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs; static, part of the key of every compilation.

    Attributes:
      kernel: one of `kernel_table.KERNELS`; None chooses by platform.
      mesh: devices that the model is spread over; None for one device.
      batch: mesh axis of the batch; None: every device has the whole batch.
      heads: mesh axes of the KV heads; None: every device computes all of them.
      mlp: mesh axes of the MLP's inner features; None: every device computes all of them.
      vocab: mesh axes of the rows of embedding and head; None: every device has all of them.
    """

    kernel: str | None = None
    mesh: Mesh | None = None
    batch: str | None = None
    heads: Axes = None
    mlp: Axes = None
    vocab: Axes = None

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
        """Whether a model's windows and caches must have the shapes and the layout that the TPU's kernels take."""
        return self.resolved(dtype, head_dim) in TPU_KERNELS

    def per_device(self, function: Callable, specs: Any, out_specs: Any) -> Callable:
        """`function` over each device's part of its arguments; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def rows_spec(self, width: int) -> P:
        """Of `[B, W, ...]` arrays: rows spread over the devices of a group, if there are as many for each."""
        if self.mesh is None:
            return P(None, None)
        group = tuple(axis for axis in self.mesh.axis_names if axis != DATA)
        return P(self.batch, group if width % self.parts(group) == 0 else None)

    def parts(self, axes: Axes) -> int:
        """Over how many devices something is spread that lies along mesh axes: 1 if along none."""
        if self.mesh is None or axes is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


ONE_DEVICE = Execution()

Block = tuple[tuple[int, int], ...]
"""A part of an array: where it begins and ends along each axis."""
Blocks = Mapping[Block, np.ndarray]

DATA, TENSOR = "data", "tensor"
"""Mesh axes: of the batch, and of everything else."""
COPIES = "copies"
"""Mesh axis, before `TENSOR`, of a drafter with fewer KV heads than there are devices: of equal devices as to heads."""

LOGICAL_AXES = (
    (r"embed$", ("vocab", None)),
    (r"head\.(weight|scale)$", ("vocab", None)),
    (r"attention\.qkv\.(weight|scale)$", ("heads", None, None)),
    (r"attention\.qkv\.bias$", ("heads", None)),
    (r"attention\.o\.weight$", (None, "heads")),
    (r"mlp\.gate_up\.(weight|scale)$", (None, "mlp", None)),
    (r"mlp\.gate_up\.bias$", (None, "mlp")),
    (r"mlp\.down\.weight$", (None, "mlp")),
    (r"(attention\.o|mlp\.down)\.scale$", ()),
    (r".*(norm|bias).*", ()),
)
"""Names of parameters, and the logical axis of each of their dimensions: fields of `Execution`."""


def parameter_spec(name: str, execution: Execution) -> P:
    """How a parameter is spread; `name` is its path, joined by dots."""
    for pattern, axes in LOGICAL_AXES:
        if re.search(pattern, name):
            return P(*(axis and getattr(execution, axis) for axis in axes))
    raise ValueError(f"sharding.LOGICAL_AXES says nothing about the parameter {name}")


def parameter_specs(module: Any, execution: Execution) -> Any:
    """`module` with a `PartitionSpec` in the place of each parameter; None on one device."""
    if execution.mesh is None:
        return None
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_spec(name_of(path), execution), module)


def name_of(path: Sequence[Any]) -> str:
    """A parameter's name from its path in a pytree of modules."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
    return ".".join(part for part in parts if part not in ("", "value"))


def total(x: Float[Array, "*R E"], axis: Axes) -> Float[Array, "*R E"]:
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
    """`jax.device_put` that sends nothing between processes: each has the value, or all that its devices shall hold.

    Raises:
      ValueError: a part of it lies on another process alone; says `name`. See `whole`.
    """
    if place.is_fully_addressable:
        return jax.device_put(value, place)
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, place, lambda part: value[part])
    if value.sharding.is_equivalent_to(place, value.ndim):
        parts = [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, place, parts)
    held = {_block(shard.index, value.shape): shard.data for shard in value.addressable_shards}

    def found(part: tuple[slice, ...]) -> np.ndarray:
        wanted = _block(part, value.shape)
        for block, data in held.items():
            if all(start <= low and high <= end for (start, end), (low, high) in zip(block, wanted)):
                inside = tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(block, wanted))
                return np.asarray(data)[inside]
        raise ValueError(f"{name} {list(value.shape)}: another process has {wanted}, and parts are not sent")

    return jax.make_array_from_callback(value.shape, place, found)


def whole(value: Array) -> Array:
    """All of an array on one device of this process; as it is if that is all there is (or while it is traced).

    Parts on other processes are sent, and waited for: two exchanges under way at once can lock each other out.
    """
    if isinstance(value, jax.core.Tracer) or value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        value = jax.block_until_ready(_gathered(value.sharding)(value))
    return value.addressable_data(0)


@functools.cache
def _gathered(place: NamedSharding) -> Callable:
    return jax.jit(lambda value: value, out_shardings=NamedSharding(place.mesh, P()))


def equal(value: np.ndarray, array: jax.Array) -> bool:
    """Whether an array holds these values, on whichever processes it lies."""
    if array.is_fully_addressable:
        return np.array_equal(value, np.asarray(array))
    return bool(_equal(put(value, array.sharding), array))


_equal = jax.jit(lambda one, other: (one == other).all())


def constrain_rows(tree: Any, execution: Execution) -> Any:
    """Tells XLA that arrays are spread like the batch, their leading axis, and otherwise whole on every device."""
    if execution.mesh is None:
        return tree

    def placed(x: Array) -> Array:
        spec = P(execution.batch) if x.ndim else P()
        return jax.lax.with_sharding_constraint(x, NamedSharding(execution.mesh, spec))

    return jax.tree.map(placed, tree)


def make_mesh(tensor: int = 1, data: int = 1, config: Callable[[], ModelConfig] | None = None) -> Mesh:
    """A mesh of the first `tensor * data` devices; of several processes, of all that they have together.

    Args:
      config: of the model that is to be spread, for the advice in an error.

    Raises:
      OptionError: there are fewer, or some process would be left out.
    """
    count, processes = len(jax.devices()), jax.process_count()
    for flag, value in (("tensor", tensor), ("data", data)):
        if value < 1:
            raise OptionError(f"--{flag}-parallel {value}: must be at least 1")
    if tensor * data > count:
        raise OptionError(
            f"--tensor-parallel {tensor} (x {data} data-parallel): there are {count} {jax.default_backend()} devices"
        )
    if processes > 1 and tensor * data < count:
        raise OptionError(
            f"--tensor-parallel {tensor} (x {data} data-parallel): {processes} processes have {count} devices "
            f"together, and all take part{'' if config is None else f'; {_advice(config(), data, count)}'}"
        )
    return mesh_of(jax.devices()[: tensor * data], data)


def mesh_of(devices: Sequence[Any], data: int = 1) -> Mesh:
    """A mesh of the given devices, neighbours along the tensor axis."""
    grid = np.asarray(devices).reshape(data, -1)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def kv_copies(config: ModelConfig, tensor: int) -> int | None:
    """How often each KV head is stored so that every device has one; None where the counts do not fit."""
    if config.num_kv_heads % tensor == 0:
        return 1
    copies, rest = divmod(tensor, config.num_kv_heads)
    return copies if rest == 0 else None


def copies_work_alike(config: ModelConfig, device: Any, tensor: int, rows: int = 32) -> bool:
    """Whether devices that hold a copy of the same KV head should all compute all of its query heads, instead of a part
    of them each.

    Each then reads more weights, but the sum behind attention is over as many devices as there are KV heads, and a
    small model spread over many chips spends most of its time on sums. By the published figures of TPUs; never for
    other devices, of which nothing is known here.

    Args:
      rows: of a pass, in all.
    """
    chip = hardware.CHIPS.get(device.device_kind)
    if chip is None:
        return False
    width, heads = config.hidden_size, config.num_kv_heads
    weights = 2 * width * config.head_dim * 2 * (config.num_heads + heads)
    read = weights * (1 / heads - 1 / tensor) / (chip.bandwidth * chip.streaming)
    size = 2 * rows * width
    saved = hardware.allreduce_s(chip, tensor, size) - hardware.allreduce_s(chip, heads, size)
    return saved > 1.5 * read  # with less, compiled programs did not gain


def _advice(config: ModelConfig, data: int, count: int) -> str:
    """What would do for a model on `count` devices, of which several processes must take all."""
    alone = jax.process_count() == 1
    most = count // data if alone else 2 * max(count, config.num_kv_heads)
    fine = [n for n in range(1, most + 1) if kv_copies(config, n) and config.intermediate_size % n == 0]
    if alone:
        return f"{', '.join(map(str, fine))} would do"
    if count % data == 0 and count // data in fine:
        return f"--tensor-parallel {count // data} would do"
    tensor = max(n for n in fine if count % n == 0)
    return (
        f"this model takes {', '.join(map(str, fine))} devices together; or, from Python and for batches, in groups: "
        f"FailFast.load(..., tensor_parallel={tensor}, data_parallel={count // tensor})"
    )


def execution_of(config: ModelConfig, mesh: Mesh, *, drafter: bool = False, kernel: str | None = None) -> Execution:
    """How a model runs on a mesh of `make_mesh`.

    What does not divide evenly stays whole on every device: the vocabulary of any model, the heads and the MLP of
    a drafter. A target's KV heads are copied until every device has one (`Decoder.with_execution`), and its query heads
    divided among the copies; a drafter's too, unless `copies_work_alike`.

    Raises:
      OptionError: the target's heads or its MLP do not divide over the devices.
    """
    tensor, data = mesh.shape[TENSOR], mesh.shape[DATA]
    copies, mlp = kv_copies(config, tensor), config.intermediate_size % tensor == 0
    heads = copies is not None
    if not drafter and not (heads and mlp):
        what = (
            f"the MLP's {config.intermediate_size} features" if heads else f"{config.num_kv_heads} key and value heads"
        )
        raise OptionError(
            f"--tensor-parallel {tensor}: {what} cannot be spread evenly over {tensor} devices; "
            f"{_advice(config, data, max(mesh.size, len(jax.devices())))}"
        )
    spread: Axes = TENSOR if tensor > 1 else None
    some = spread
    if drafter and heads and copies > 1 and copies_work_alike(config, device_of(kernel, mesh.devices.flat[0]), tensor):
        grid = mesh.devices.reshape(data, copies, config.num_kv_heads)
        mesh = Mesh(grid, (DATA, COPIES, TENSOR), axis_types=(AxisType.Auto,) * 3)
        spread = (COPIES, TENSOR)
    return Execution(
        kernel=kernel,
        mesh=mesh,
        batch=DATA if data > 1 else None,
        heads=some if heads else None,
        mlp=spread if mlp else None,
        vocab=spread if config.vocab_size % tensor == 0 else None,
    )


def check_batch(batch: int, mesh: Mesh) -> None:
    """Raises OptionError: the data axis does not divide the batch."""
    if batch % mesh.shape[DATA]:
        raise OptionError(
            f"a batch of {batch} over {mesh.shape[DATA]} data-parallel groups: must be a multiple of their number"
        )


def placement(config: ModelConfig, mesh: Mesh, *, drafter: bool = False) -> Callable[[str, tuple[int, ...]], Any]:
    """Where each parameter of a model goes as it is read: `checkpoints.checkpoint.Place`."""
    execution = execution_of(config, mesh, drafter=drafter)
    if kv_copies(config, execution.parts(execution.heads)) != 1:
        # Copied once they are all there.
        execution = dataclasses.replace(execution, heads=None)
    return lambda name, shape: NamedSharding(execution.mesh, parameter_spec(name, execution))
