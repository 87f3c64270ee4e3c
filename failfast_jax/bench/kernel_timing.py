"""Kernels beside XLA's operations and beside the memory's floor: the part `kernels` of `bench micro`.

Attention is checked and timed on every platform: the shapes of public models on an accelerator, the default target's
on a CPU, which also times products. A timed run goes through all matrices of a step, or through as many caches as a
model has layers. So little is left in the processor's own cache when its turn comes again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.bench.timing import median_ms
from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.kernel_table import attend, kernel_of
from failfast_jax.kernels.row_operations import product, xla_product
from failfast_jax.models.attention_check import check_attention, is_right
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import hardware
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.tables import markdown

SHAPES = {
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b/32b": (40, 8, 128),
    "qwen2.5-32b tp8": (5, 1, 128),
    "fast-dllm-1.5b": (12, 2, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
"""Query heads, KV heads and head_dim of public models."""
WINDOWS = ((16, 1020, 1), (64, 4032, 1), (72, 511, 32), (128, 2047, 32), (512, 1536, 1))
"""Checked windows: rows, cache position of the first, block size of the mask. They are verifies, drafter windows and a
chunk of a prompt; they begin inside tiles and end at the cache's end."""
STORED = ("bfloat16", "int8")
"""Dtypes of stored weights, besides the model's own."""
REPEATS = 9


@dataclasses.dataclass(frozen=True)
class TimedSizes:
    """Sizes that are timed on one platform."""

    product_rows: Sequence[int]
    attention_rows: Sequence[int]
    contexts: Sequence[int]
    """Live cache lengths; the caches hold the longest."""
    chains: int
    """Runs one after the other, so that dispatch overlaps with work."""


SIZES = {
    "cpu": TimedSizes((1, 2, 4, 8, 16, 32, 64, 128), (1, 8, 16, 512), (512, 2048, 7000), chains=1),
    "accelerator": TimedSizes((), (1, 8, 72), (1024, 4096, 16384, 32768), chains=5),
}
LIVE_BYTES, LAYERS = 2**28, (4, 48)
"""Live caches that a run goes through on an accelerator, several times its own cache; least and most layers."""


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """Programs that compute the same by different routes."""

    labels: dict[str, Any]
    routes: dict[str, Callable[[], Any]]
    nbytes: float
    """Bytes that a run has to read."""
    chains: int = 1


def kernel_report(target: Decoder, sizes: TimedSizes | None = None) -> dict[str, Any]:
    """Attention kernels checked against plain jnp; kernels and XLA timed beside the memory's floor.

    Args:
      target: the model whose matrices and heads are timed on a CPU.
      sizes: the timed sizes; None: the platform's.
    """
    on_cpu, config = jax.default_backend() == "cpu", target.config
    sizes = sizes or SIZES["cpu" if on_cpu else "accelerator"]
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    shapes, layers = ({"default target": heads}, config.num_layers) if on_cpu else (SHAPES, None)
    dtype = target.dtype if on_cpu else jnp.dtype(jnp.bfloat16)
    checks = check_shapes(shapes, WINDOWS)
    bandwidth, rows = hardware.bandwidth(2**29)["read"], []
    attention = (attention_cases(*shape, dtype, sizes, layers) for shape in shapes.items())
    cases = itertools.chain(product_cases(target, sizes), *attention)
    total = len(sizes.product_rows) + len(shapes) * len(sizes.contexts) * len(sizes.attention_rows)
    for case in progress_bar("kernels", "case", cases, total=total):
        ms = median_ms(case.routes, REPEATS, per=case.chains)
        rows.append({**case.labels, "reading_ms": 1e3 * case.nbytes / bandwidth, "ms": ms})
    right = all(check["right"] for check in checks)
    return {"right": right, "checks": checks, "read_bytes_per_s": bandwidth, "times": rows}


def check_shapes(
    shapes: Mapping[str, tuple[int, int, int]], windows: Sequence[tuple[int, int, int]], kernel: str | None = None
) -> list[dict[str, Any]]:
    """Compares the attention kernel of each shape and window with plain jnp in float32.

    Args:
      shapes: query heads, KV heads and head_dim by name.
      windows: as `WINDOWS`.
      kernel: one of `kernel_table.KERNELS`; None: the one that serves here.
    """
    checks = []
    cases = [(name, window) for name in shapes for window in windows]
    for name, (rows, start, block_size) in progress_bar("kernel checks", "case", cases):
        case = {"rows": rows, "start": start, "block_size": block_size}
        try:
            result = check_attention(*shapes[name], **case, kernel=kernel)
            right = is_right(result)
        except Exception as error:  # the other shapes are still of use
            result, right = {"failed": f"{type(error).__name__}: {error}"[:2000]}, False
        checks.append({"shape": name, **case, **result, "right": right})
    return checks


def product_cases(target: Decoder, sizes: TimedSizes) -> Iterator[KernelCase]:
    """All matrices of a step by number of rows: our product, XLA's, and ours of narrower weights."""
    if not sizes.product_rows:
        return
    linears = [(layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down) for layer in target.layers]
    weights = [linear.weight[...] for layer in linears for linear in layer] + [target.head_weight]
    weights = [jax.block_until_ready(weight.reshape(-1, weight.shape[-1])) for weight in weights]
    stored = {name: [weight.astype(name) for weight in weights] for name in STORED}
    inputs = sorted({weight.shape[1] for weight in weights})

    @functools.partial(jax.jit, static_argnames="multiply")
    def step(multiply: Callable[..., jax.Array], weights: list[jax.Array], rows: list[jax.Array]) -> jax.Array:
        by_size, last = dict(zip(inputs, rows)), jnp.float32(0)
        for weight in weights:  # each product waits for the one before
            last = multiply(by_size[weight.shape[1]] + last, weight, jnp.float32)[0, 0] * 1e-9
        return last

    for width in sizes.product_rows:
        rows = [jnp.ones((width, size), target.dtype) for size in inputs]
        routes = {"ours": functools.partial(step, product, weights, rows)}
        routes["xla"] = functools.partial(step, xla_product, weights, rows)
        routes |= {name: functools.partial(step, product, narrow, rows) for name, narrow in stored.items()}
        nbytes = sum(weight.nbytes for weight in weights)
        yield KernelCase({"kernel": "product", "shape": "default target", "rows": width}, routes, nbytes)


def attention_cases(
    shape: str, heads: tuple[int, int, int], dtype: jnp.dtype, sizes: TimedSizes, layers: int | None
) -> Iterator[KernelCase]:
    """All of a layer between its two projections (rotate, write, attend), by live positions and rows.

    Args:
      layers: layers that a run goes through; None: as many as have `LIVE_BYTES`.
    """
    num_heads, kv_heads, head_dim = heads
    device = jax.devices()[0]
    plain = "xla" if device.platform == "gpu" else "reference"
    kernels = {"ours": kernel_of(device, dtype, head_dim), "xla": plain}
    if kernels["ours"] == plain:
        del kernels["ours"]
    capacity, rng = round_up(max(sizes.contexts), 256), np.random.default_rng(0)

    @functools.partial(jax.jit, static_argnames="kernel", donate_argnames="cache")
    def attend_layers(qkv, cache, window, kernel):
        keys, values = list(cache.k), list(cache.v)
        for index, layer in enumerate(zip(cache.k, cache.v)):
            outputs, (keys[index], values[index]) = attend(qkv, layer, window, kernel=kernel)
            qkv = qkv + 1e-9 * outputs[:, :, :1, None]
        return qkv, cache.replace(k=tuple(keys), v=tuple(values))

    for context in sizes.contexts:
        live_bytes = 2 * kv_heads * context * head_dim * dtype.itemsize
        count = layers or min(max(LIVE_BYTES // live_bytes, LAYERS[0]), LAYERS[1])
        draws = (jnp.asarray(rng.normal(size=(1, kv_heads, capacity, head_dim)), dtype) for _ in range(2))
        keys, values = (tuple(jnp.copy(draw) for _ in range(count)) for draw in draws)
        caches = [KVCache(keys, values)]

        def chain(qkv: jax.Array, window: Window, kernel: str, caches: list[KVCache] = caches) -> jax.Array:
            for _ in range(sizes.chains):
                qkv, caches[0] = attend_layers(qkv, caches[0], window, kernel=kernel)
            return qkv

        for rows in (rows for rows in sizes.attention_rows if rows <= context):
            group = (1, rows, kv_heads, num_heads // kv_heads + 2, head_dim)
            angles = jnp.asarray(rng.normal(size=(1, rows, 1, head_dim // 2)), jnp.float32)
            window = Window(jnp.cos(angles), jnp.sin(angles), jnp.asarray([context - rows]), jnp.int32(context))
            arguments = jnp.asarray(rng.normal(size=group), dtype), window
            routes = {name: functools.partial(chain, *arguments, kernel) for name, kernel in kernels.items()}
            # Two products for each pair of a query and a position that it sees.
            pairs = rows * (context - rows) + rows * (rows + 1) / 2
            labels = {"kernel": "attention", "shape": shape, "layers": count, "rows": rows, "context": context}
            labels["gflop"] = 4e-9 * head_dim * num_heads * count * pairs
            yield KernelCase(labels, routes, count * live_bytes, sizes.chains)


def kernel_table(report: Mapping[str, Any]) -> str:
    """Formats the times as Markdown."""
    cells = []
    for row in report["times"]:
        shown = ", ".join(f"{name} {ms:.3f} ({ms / row['reading_ms']:.2f})" for name, ms in row["ms"].items())
        cells.append([row["kernel"], row["shape"], row.get("layers", "-"), row.get("context", "-"), row["rows"]])
        cells[-1] += [f"{row['reading_ms']:.3f}", shown]
    return markdown(["kernel", "shape", "layers", "context", "rows", "floor ms", "ms (over floor)"], cells)
