"""The GPU attention, checked and timed on the GPU at hand: the part `attention` of `bench micro`.

First numerics: the kernel against the jnp reference in float32, and bit for bit against itself with another live length
and another start of the window. Then times: a chain of calls over as many caches as a model has layers (enough that
none is still in the GPU's own cache when its turn comes again), by context and window width, against the time that
the live cache takes to be read at the measured copy bandwidth. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.bench.clock import interleaved
from failfast_jax.kernels import gpu_attention, plain_attention
from failfast_jax.util import hardware
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.tables import markdown

# Query heads, KV heads, head_dim.
SHAPES = {
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b/32b": (40, 8, 128),
    "qwen2.5-32b tp8": (5, 1, 128),
    "fast-dllm-1.5b": (12, 2, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
CONTEXTS, WIDTHS = (1024, 4096, 16384, 32768), (1, 8, 72)
"""Live cache lengths and window widths; the caches hold the longest."""
DTYPE = "bfloat16"
REPEATS = 9
TOLERANCE = 2e-2
"""Largest difference from the reference, relative to the largest output."""
ROTATED_BYTES = 2**28
"""Caches that a timing goes through in turn: several times the last-level cache of any GPU."""


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))(key)


def route(name: str, block_size: int, *, interpret: bool = False) -> Callable[..., jax.Array]:
    """An attention function with the kernels' common arguments: `kernel`, or `xla` for the dense route."""
    if name == "kernel":
        return functools.partial(gpu_attention.window_attention, block_size=block_size, interpret=interpret)
    return functools.partial(gpu_attention.dense_window_attention, block_size=block_size, implementation=name)


def numerics(
    attention: Callable[..., jax.Array],
    *,
    heads: tuple[int, int, int],
    width: int,
    capacity: int,
    dtype: str,
    block_size: int,
    seed: int,
    batch: int = 2,
) -> dict[str, Any]:
    """The difference from the reference at drawn positions, and whether rows keep their bits.

    Returns:
      `error`, relative to the largest output; `same_live` and `same_start`: whether the rows were bit-identical with
      another live length, and where the window began one position later.
    """
    query_heads, kv_heads, head_dim = heads
    keys = jax.random.split(jax.random.key(seed), 3)
    line = _normal(keys[0], (batch, width + 1, query_heads, head_dim), dtype)
    k, v = (_normal(key, (batch, kv_heads, capacity, head_dim), dtype) for key in keys[1:])
    draw = np.random.default_rng(seed)
    start = jnp.asarray(draw.integers(0, capacity - width - block_size, size=batch), jnp.int32)
    until = jnp.asarray(draw.choice([0, width - 1]) + start * (seed % 2), jnp.int32)
    attention = jax.jit(attention)
    last = plain_attention.visible_until(start + width - 1, block_size)
    live = jnp.int32(min(capacity, int(jnp.maximum(last, until).max()) + 1))
    out = np.asarray(attention(line[:, :width], k, v, start, until, live), np.float32)
    arrays = (x.astype(jnp.float32) for x in (line[:, :width], k, v))
    with jax.default_matmul_precision("highest"):
        expected = plain_attention.window_attention(*arrays, start, until, live, block_size=block_size, tile=128)
    expected = np.asarray(expected)
    other = np.asarray(attention(line[:, :width], k, v, start, until, jnp.int32(capacity)), np.float32)
    later = np.asarray(attention(line[:, 1:], k, v, start + 1, until, jnp.int32(capacity)), np.float32)
    return {
        "error": float(np.abs(out - expected).max() / np.abs(expected).max()),
        "same_live": bool(np.array_equal(out, other)),
        "same_start": bool(np.array_equal(out[:, 1:], later[:, :-1])),
    }


def time_call(attention: Callable[..., jax.Array], shape: str, width: int, context: int) -> float:
    """Seconds of one call at a live length of `context`, in a chain of calls over different caches."""
    query_heads, kv_heads, head_dim = SHAPES[shape]
    layers = min(max(ROTATED_BYTES // live_bytes(shape, context), 4), 48)
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    q = _normal(keys[0], (1, width, query_heads, head_dim), DTYPE)
    cache = (1, kv_heads, max(CONTEXTS), head_dim)
    caches = [tuple(_normal(key, cache, DTYPE) for key in keys[i : i + 2]) for i in range(1, 2 * layers, 2)]

    @jax.jit
    def chain(q, caches, start, until, live):
        for k, v in caches:
            q = attention(q, k, v, start, until, live)
        return q

    start = jnp.full((1,), context - width, jnp.int32)
    rest = (start, jnp.zeros_like(start), jnp.int32(context))
    seconds = interleaved({"chain": lambda: [chain(q, caches, *rest) for _ in range(5)]}, REPEATS)["chain"]
    return min(seconds) / 5 / layers


def live_bytes(shape: str, context: int) -> int:
    """Bytes of the keys and values that a call looks at."""
    _, kv_heads, head_dim = SHAPES[shape]
    return 2 * kv_heads * context * head_dim * jnp.dtype(DTYPE).itemsize


# -- the part ----------------------------------------------------------------------------------------------


def check() -> None:
    """Raises ValueError if there is no GPU."""
    platform = jax.devices()[0].platform
    if platform != "gpu":
        raise ValueError(
            f"--parts attention: no GPU here (JAX runs on {platform}). Without one, tests/kernels/test_gpu.py "
            "simulates the kernel and tests/test_gpu_compile.py compiles it"
        )


def routes_of(shape: str) -> list[str]:
    """What can attend to such heads on this GPU: the kernel is for some of them only."""
    heads, kv_heads, head_dim = SHAPES[shape]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": max(CONTEXTS)}
    reason = gpu_attention.supports(width=max(WIDTHS), dtype=DTYPE, device=jax.devices()[0], **sizes)
    if reason:
        print(f"attention, {shape}: without the kernel: {reason}", file=sys.stderr)
    return ["xla"] if reason else ["kernel", "xla"]


def all_numerics(routes: dict[str, list[str]]) -> tuple[list[dict[str, Any]], bool]:
    """`numerics` of every shape, route and width, and whether all are right."""
    checks, ok = [], True
    cases = [(shape, name, width) for shape, names in routes.items() for name in names for width in WIDTHS]
    for index, (shape, name, width) in enumerate(progress_bar("numerics", "case", cases)):
        block_size = (1, 32)[index % 2]
        case = {"heads": SHAPES[shape], "width": width, "dtype": DTYPE, "block_size": block_size}
        found = numerics(route(name, block_size), capacity=4096, seed=index, **case)
        checks.append({"route": name, "shape": shape, "width": width, "block_size": block_size} | found)
        kept = name != "kernel" or (found["same_live"] and found["same_start"])
        if found["error"] > TOLERANCE or not kept:
            ok = False
            print(f"WRONG: {checks[-1]}", file=sys.stderr)
    return checks, ok


def all_times(routes: dict[str, list[str]], bandwidth: float) -> list[dict[str, Any]]:
    """Seconds of every shape, context and width by route, and `floor`: the live cache at the bandwidth of a copy."""
    rows = []
    cases = [(shape, context, width) for shape in routes for context in CONTEXTS for width in WIDTHS]
    for shape, context, width in progress_bar("timing", "case", cases):
        taken = {name: time_call(route(name, 1), shape, width, context) for name in routes[shape]}
        floor = live_bytes(shape, context) / bandwidth
        rows.append({"shape": shape, "context": context, "width": width, "floor": floor, "seconds": taken})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The times as Markdown."""
    cells = []
    for row in rows:
        floor, times = row["floor"], row["seconds"].items()
        shown = ", ".join(f"{name} {seconds * 1e6:.1f} ({seconds / floor:.2f})" for name, seconds in times)
        cells.append([row["shape"], row["context"], row["width"], f"{floor * 1e6:.1f}", shown])
    return markdown(["shape", "context", "rows", "floor us", "us (over floor)"], cells)


def report() -> dict[str, Any]:
    """Everything that the part finds; `numerics_ok` is False if the kernel is wrong."""
    routes = {shape: routes_of(shape) for shape in SHAPES}
    checks, ok = all_numerics(routes)
    worst = max(check["error"] for check in checks)
    print(f"numerics: {len(checks)} cases, largest error {worst:.1e}, {'ok' if ok else 'WRONG'}", file=sys.stderr)
    bandwidth = hardware.bandwidth(2**30)["copy"]
    rows = all_times(routes, bandwidth)
    print(f"copies move {bandwidth / 1e9:.0f} GB/s\n\n{table(rows)}\n", file=sys.stderr)
    return {"dtype": DTYPE, "copy_bytes_per_second": bandwidth, "numerics": checks, "numerics_ok": ok, "times": rows}
