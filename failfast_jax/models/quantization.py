"""Weight-only quantisation: the matrices of a model in fewer bits, one scale for each output; qwix rounds them.

Activations, embeddings and norms stay in the model's dtype, and so does the arithmetic: what a decode pass must read
from memory becomes half of bfloat16. Integers become floats inside the product.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int8

from failfast_jax.errors import OptionError
from failfast_jax.models.layers import Linear
from failfast_jax.models.model_config import ModelConfig

SCHEMES = ("int8",)
"""`int8`: symmetric, rounded to the nearest of 256 levels, a float32 scale for each output."""


def check(scheme: str | None, flag: str = "--quantize") -> None:
    """Raises OptionError: an unknown scheme, or one whose library is not installed."""
    if scheme is None:
        return
    if scheme not in SCHEMES:
        raise OptionError(f"{flag} {scheme}: must be one of {', '.join(SCHEMES)}")
    if importlib.util.find_spec("qwix") is None:
        raise OptionError(f'{flag} {scheme}: needs qwix, which is not installed: pip install -e ".[quant]"')


def rounded(
    weight: Float[Array, "*O I"] | jax.ShapeDtypeStruct,
) -> tuple[Int8[Array, "*O I"], Float[Array, "*O 1"]] | tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """A weight in int8 and its scales, spread as the weight is; abstract if the weight is.

    Returns once they are there: devices exchange maxima, and two exchanges at once can lock each other out.
    """
    if isinstance(weight, jax.ShapeDtypeStruct):
        places = _places(weight.sharding, weight.ndim)
        shapes = jax.eval_shape(_round, weight)
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x, place in zip(shapes, places))
    return jax.block_until_ready(rounder(weight.sharding, weight.ndim)(weight))


def converter(config: ModelConfig) -> Callable[[str, jax.Array], dict[str, jax.Array]]:
    """For `checkpoints.checkpoint`: what is kept, by name, of a decoder's parameter that has just been read."""

    def convert(name: str, value: jax.Array) -> dict[str, jax.Array]:
        if name == "embed" and config.tie_embeddings:
            weight, scale = rounded(value)
            return {"embed": value, "head.weight": weight, "head.scale": scale}
        # Norms are the only other weights, and vectors.
        if not name.endswith(".weight") or value.ndim == 1:
            return {name: value}
        weight, scale = rounded(value)
        return {name: weight, name.removesuffix("weight") + "scale": scale}

    return convert


def parameter_bytes(model: Any) -> int:
    """Bytes of all parameters, however many devices hold them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model))


def _round(weight):
    import qwix

    # From bfloat16 the quotients themselves would be rounded: to halves above 64.
    quantized = qwix.quantize(weight.astype(jnp.float32), jnp.int8, channelwise_axes=range(weight.ndim - 1))
    return quantized.qvalue, quantized.scale


@functools.cache
def rounder(place: jax.sharding.Sharding, ndim: int) -> Callable:
    """The compiled rounding of a weight of `ndim` axes that lies at `place`."""
    return jax.jit(_round, out_shardings=_places(place, ndim))


def _places(place: jax.sharding.Sharding | None, ndim: int) -> tuple[Any, Any]:
    """Shardings of integers and scales: the weight's, except for its inputs."""
    if not isinstance(place, NamedSharding):
        return place, place
    spec = (*place.spec, *[None] * (ndim - len(place.spec)))
    return place, NamedSharding(place.mesh, P(*spec[:-1], None))


def with_rounded_matrices(module: Any) -> Any:
    """A module with the weight of every `Linear` in it rounded; arrays, or abstract ones."""

    def with_rounded(node: Any) -> Any:
        if not isinstance(node, Linear) or node.scale is not None:
            return node
        node = copy.copy(node)
        weight, scale = rounded(node.weight.get_value())
        node.weight, node.scale = node.weight.replace(weight), nnx.Param(scale)
        return node

    return jax.tree.map(with_rounded, module, is_leaf=lambda node: isinstance(node, Linear))
