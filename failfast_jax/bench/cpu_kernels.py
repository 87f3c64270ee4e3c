"""The CPU's own kernels beside XLA's operations, and both beside the reading of what they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.errors import OptionError
from failfast_jax.kernels import cpu_product, cpu_prompt_attention
from failfast_jax.models.attention import Window, attend, cached_attention
from failfast_jax.models.kv_cache import TILE, round_up
from failfast_jax.models.layers import product, xla_product
from failfast_jax.models.rope import rotary
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import hardware

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
NARROW = ("bfloat16", "int8")
"""What weights can be stored in, besides float32."""
CONTEXTS = (512, 2048, 7000)
PROMPT = 512
"""Rows of a prompt's last chunk."""
BOTH = {"ours": "cpu", "xla": "reference"}
REPEATS = 9


def report(target: Decoder) -> dict[str, Any]:
    """Milliseconds of all matrices of a step by rows, also with narrower weights; by live positions those of its
    attention by rows, and of a prompt's, where that has a kernel.

    Raises:
      OptionError: these kernels do not serve here.
    """
    if jax.default_backend() != "cpu":
        raise OptionError(f"--parts cpu: this machine's JAX runs on {jax.default_backend()}")
    if why := cpu_product.supports(width=1, outputs=64, dtype=target.dtype):
        raise OptionError(f"--parts cpu: {why}")
    bandwidth = hardware.bandwidth(2**29)["read"]
    out = {"products": _products(target, bandwidth), "attention": _attention(target, bandwidth)}
    sizes = {"width": PROMPT, "capacity": round_up(max(CONTEXTS), TILE), "head_dim": target.config.head_dim}
    if cpu_prompt_attention.supports(**sizes, dtype=target.dtype, cached=target.dtype) is None:
        out["prompt"] = _prompt(target)
    return out


def _products(target: Decoder, bandwidth: float) -> dict[str, Any]:
    linears = [(one.attention.qkv, one.attention.o, one.mlp.gate_up, one.mlp.down) for one in target.layers]
    weights = [linear.weight[...] for layer in linears for linear in layer] + [target.head_weight]
    weights = [jax.block_until_ready(weight.reshape(-1, weight.shape[-1])) for weight in weights]
    sizes = sorted({weight.shape[1] for weight in weights})

    def one_after_the_other(by: Callable[..., jax.Array], weights: list[jax.Array], rows: list[jax.Array]) -> jax.Array:
        inputs, before = dict(zip(sizes, rows)), jnp.float32(0)
        for weight in weights:
            before = by(inputs[weight.shape[1]] + before, weight, jnp.float32)[0, 0] * 1e-9
        return before

    out: dict[str, Any] = {"reading_ms": 1e3 * sum(weight.nbytes for weight in weights) / bandwidth}
    programs = {
        name: jax.jit(functools.partial(one_after_the_other, by))
        for name, by in (("ours", product), ("xla", xla_product))
    }
    narrow = {name: [weight.astype(name) for weight in weights] for name in NARROW}
    for width in WIDTHS:
        rows = [jnp.ones((width, size), target.dtype) for size in sizes]
        acts = {name: functools.partial(program, weights, rows) for name, program in programs.items()}
        acts |= {name: functools.partial(programs["ours"], held, rows) for name, held in narrow.items()}
        out[str(width)] = {f"{name}_ms": 1e3 * s for name, s in medians(interleaved(acts, REPEATS)).items()}
    return out


def _attention(target: Decoder, bandwidth: float) -> dict[str, Any]:
    config, layers, out = target.config, len(target.layers), {}
    shape = (1, config.num_kv_heads, -(-max(CONTEXTS) // 256) * 256, config.head_dim)
    rng = np.random.default_rng(0)
    caches = [[jnp.asarray(rng.standard_normal(shape), target.dtype) for _ in range(2)] for _ in range(layers)]

    @functools.partial(jax.jit, static_argnames="kernel")
    def one_after_the_other(q, caches, start, live, kernel):
        for k, v in caches:
            q = q + 1e-9 * cached_attention(q, k, v, start, live, 1, kernel=kernel)
        return q

    for live in CONTEXTS:
        read = 2 * layers * live * config.num_kv_heads * config.head_dim * target.dtype.itemsize
        row: dict[str, Any] = {"reading_ms": 1e3 * read / bandwidth}
        for width in (1, 8, 16):
            q = jnp.asarray(rng.standard_normal((1, width, config.num_heads, config.head_dim)), target.dtype)
            start = jnp.asarray([live - width], jnp.int32)
            go = functools.partial(one_after_the_other, q, caches, start, jnp.int32(live))
            acts = {name: functools.partial(go, kernel=kernel) for name, kernel in BOTH.items()}
            row[f"{width}"] = {f"{name}_ms": 1e3 * s for name, s in medians(interleaved(acts, REPEATS)).items()}
        out[str(live)] = row
    return out


def _prompt(target: Decoder) -> dict[str, Any]:
    """Of a prompt's last chunk, by positions: what lies between two projections, of all layers; and the arithmetic of
    two products for each pair of a query and a position that it sees."""
    config, out = target.config, {}
    members = config.num_heads // config.num_kv_heads + 2
    rng = np.random.default_rng(0)
    shape = (1, PROMPT, config.num_kv_heads, members, config.head_dim)
    qkv = jnp.asarray(rng.standard_normal(shape), target.dtype)
    cache = target.init_cache(1, max(CONTEXTS))

    @functools.partial(jax.jit, static_argnames="kernel", donate_argnames="cache")
    def one_after_the_other(qkv, cache, window, kernel):
        keys, values = list(cache.k), list(cache.v)
        for index, layer in enumerate(zip(cache.k, cache.v)):
            heads, (keys[index], values[index]) = attend(qkv, layer, window, kernel=kernel)
            qkv = qkv + 1e-9 * heads[:, :, :1, None]
        return qkv, cache.replace(k=tuple(keys), v=tuple(values))

    def go(kernel: str, window: Window) -> jax.Array:
        nonlocal cache
        result, cache = one_after_the_other(qkv, cache, window, kernel=kernel)
        return result

    for live in CONTEXTS:
        start = jnp.asarray([live - PROMPT], jnp.int32)
        window = Window(*rotary(config, start[:, None] + jnp.arange(PROMPT)), start, jnp.int32(live))
        acts = {name: functools.partial(go, kernel, window) for name, kernel in BOTH.items()}
        row = {f"{name}_ms": 1e3 * s for name, s in medians(interleaved(acts, REPEATS)).items()}
        pairs = PROMPT * (live - PROMPT) + PROMPT * (PROMPT + 1) / 2
        operations = 4 * config.head_dim * config.num_heads * config.num_layers * pairs
        out[str(live)] = row | {"gflop": operations / 1e9}
    return out
