"""Tensor and data parallelism as data: the logical axes of every array, and the mesh axis each of them is spread over.

The layers of a model run under `shard_map`: each device computes its heads and its part of the MLP, and the two
sums over devices in a layer are the only traffic. Embedding and head are spread by vocabulary. What a round keeps
beside the caches is small and the same on all devices.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.errors import OptionError
from failfast_jax.models.attention import Execution
from failfast_jax.models.cache import KVCache
from failfast_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from failfast_jax.models.transformer import Decoder

DATA, TENSOR = "data", "tensor"
"""Mesh axes: of the batch, and of everything else."""

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


def constrain(tree: Any, execution: Execution, spec: P) -> Any:
    """Tells XLA how arrays are spread; nothing on one device."""
    if execution.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(execution.mesh, spec))


def make_mesh(tensor: int = 1, data: int = 1) -> Mesh:
    """A mesh of the first `tensor * data` devices.

    Raises:
      OptionError: there are fewer.
    """
    count = len(jax.devices())
    for flag, value in (("tensor", tensor), ("data", data)):
        if value < 1:
            raise OptionError(f"--{flag}-parallel {value}: must be at least 1")
    if tensor * data > count:
        raise OptionError(
            f"--tensor-parallel {tensor} (x {data} data-parallel): there are {count} {jax.default_backend()} devices"
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
    group = config.num_heads // config.num_kv_heads
    return copies if rest == 0 and group % copies == 0 else None


def execution_of(config: ModelConfig, mesh: Mesh, *, drafter: bool = False, kernel: str | None = None) -> Execution:
    """How a model runs on a mesh of `make_mesh`.

    What does not divide evenly stays whole on every device: the vocabulary of any model, the heads and the MLP of
    a drafter.

    Raises:
      OptionError: the target's heads or its MLP do not divide over the devices.
    """
    tensor, data = mesh.shape[TENSOR], mesh.shape[DATA]
    heads = kv_copies(config, tensor) is not None
    mlp = config.intermediate_size % tensor == 0
    if not drafter and not heads:
        raise OptionError(
            f"--tensor-parallel {tensor}: {config.num_heads} query heads in {config.num_kv_heads} groups cannot be "
            f"spread evenly over {tensor} devices"
        )
    if not drafter and not mlp:
        raise OptionError(f"--tensor-parallel {tensor}: does not divide the MLP's {config.intermediate_size} features")
    spread = TENSOR if tensor > 1 else None
    return Execution(
        kernel=kernel,
        mesh=mesh,
        batch=DATA if data > 1 else None,
        heads=spread if heads else None,
        mlp=spread if mlp else None,
        vocab=spread if config.vocab_size % tensor == 0 else None,
    )


def with_execution(model: Decoder, execution: Execution) -> Decoder:
    """The model as it is computed on a mesh, abstract or not: KV heads copied until every device has one.

    Parameters stay where they are; see `spread`.
    """
    model = copy.copy(model)
    model.execution = execution
    tensor = execution.mesh.shape[TENSOR] if execution.heads else 1
    copies = kv_copies(model.config, tensor)
    if copies == 1:
        return model
    config = model.config
    model.config = dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim

    def expand(weight):
        """`[K, (G + 2) * H, ...]` to `[K * copies, (G / copies + 2) * H, ...]`."""
        weight = weight.reshape(config.num_kv_heads, group + 2, head_dim, *weight.shape[2:])
        queries = weight[:, :group].reshape(config.num_kv_heads * copies, group // copies, *weight.shape[2:])
        shared = jnp.repeat(weight[:, group:], copies, axis=0)
        joined = jnp.concatenate([queries, shared], axis=1)
        return joined.reshape(joined.shape[0], -1, *joined.shape[3:])

    def expanded(parameter):
        if parameter is None:
            return None
        value = parameter.get_value()
        shape = jax.eval_shape(expand, value)
        if isinstance(value, jax.ShapeDtypeStruct):
            return parameter.replace(shape)
        spec = P(execution.heads)
        return parameter.replace(jax.jit(expand, out_shardings=NamedSharding(execution.mesh, spec))(value))

    layers = []
    for layer in model.layers:
        layer, attention, qkv = copy.copy(layer), copy.copy(layer.attention), copy.copy(layer.attention.qkv)
        qkv.weight, qkv.scale, qkv.bias = expanded(qkv.weight), expanded(qkv.scale), expanded(qkv.bias)
        attention.qkv, attention.config = qkv, model.config
        layer.attention = attention
        layers.append(layer)
    model.layers = type(model.layers)(layers)
    return model


def check_batch(batch: int, mesh: Mesh) -> None:
    """Raises OptionError: the data axis does not divide the batch."""
    if batch % mesh.shape[DATA]:
        raise OptionError(
            f"a batch of {batch} over {mesh.shape[DATA]} data-parallel groups: must be a multiple of their number"
        )


def placement(config: ModelConfig, mesh: Mesh, *, drafter: bool = False) -> Callable[[str, tuple[int, ...]], Any]:
    """Where each parameter of a model goes as it is read: `loading.Place`."""
    execution = execution_of(config, mesh, drafter=drafter)
    if execution.heads and kv_copies(config, mesh.shape[TENSOR]) != 1:
        # Copied once they are all there.
        execution = dataclasses.replace(execution, heads=None)
    return lambda name, shape: NamedSharding(mesh, parameter_spec(name, execution))


def spread(model: Any, mesh: Mesh | None, *, kernel: str | None = None, drafter: bool = False) -> Any:
    """A model as an engine runs it: its execution set, its parameters spread over the mesh (if any).

    Raises:
      OptionError: see `execution_of`.
    """
    if hasattr(model, "network"):  # target-conditioned
        network = copy.copy(model.network)
        network.execution = Execution(kernel=kernel, mesh=mesh)
        model = model.replace(network=network)
        if mesh is None:
            return model
        # The embedding stays its target's, spread like it.
        whole = jax.device_put(model.replace(embed=None), NamedSharding(mesh, P()))
        return whole.replace(embed=model.embed)
    if mesh is None:
        if kernel is None:
            return model
        model = copy.copy(model)
        model.execution = Execution(kernel=kernel)
        return model
    execution = execution_of(model.config, mesh, drafter=drafter, kernel=kernel)
    model = with_execution(model, execution)
    specs = parameter_specs(model, execution)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), model, specs)


class Keeper:
    """Where the leaves of a decoding state live: caches like their model's heads, what else a sequence has like the
    batch.

    Called with a state inside a jit, it tells XLA so.
    """

    def __init__(self, target: Any, drafter: Any = None):
        self._target = target.execution
        self._drafter = getattr(drafter, "network", drafter).execution if drafter is not None else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keeper) and (self._target, self._drafter) == (other._target, other._drafter)

    def __hash__(self) -> int:
        return hash((self._target, self._drafter))

    def shardings(self, state: Any) -> Any:
        """A `NamedSharding` for each leaf."""
        batch = state.prompt_length.shape[0]
        found = _state_shardings(state, self._target, batch)
        if self._drafter is not None:
            found = found.replace(drafter=_state_shardings(state.drafter, self._drafter, batch))
        return found

    def __call__(self, state: Any) -> Any:
        if self._target.mesh is None:
            return state
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    def shapes(self, function: Callable, *args: Any) -> Any:
        """The abstract result of a function that makes a state."""
        state = jax.eval_shape(function, *args)
        if self._target.mesh is None:
            return state
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state,
            self.shardings(state),
        )


def _state_shardings(tree: Any, execution: Execution, batch: int) -> Any:
    cache = NamedSharding(execution.mesh, P(execution.batch, execution.heads))
    rows, everywhere = NamedSharding(execution.mesh, P(execution.batch)), NamedSharding(execution.mesh, P())

    def of(node):
        if isinstance(node, KVCache):
            return jax.tree.map(lambda _: cache, node)
        # XLA leaves empty arrays whole.
        return rows if node.ndim and node.shape[0] == batch and node.size else everywhere

    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, KVCache))
