"""`python -m failfast_jax.bench.attention`: the GPU attention, checked and timed on the GPU at hand.

First numerics: the kernel against the jnp reference in float32, and bit for bit against itself with another live length
and another start of the window. Then times: a chain of calls over as many caches as a model has layers (enough that
none is still in the GPU's own cache when its turn comes again), by context and window width, against the time that
the live cache takes to be read at the measured copy bandwidth. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from failfast_jax.kernels import gpu, reference

# Query heads, KV heads, head_dim.
SHAPES = {
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b/32b": (40, 8, 128),
    "qwen2.5-32b tp8": (5, 1, 128),
    "fast-dllm-1.5b": (12, 2, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
TOLERANCE = 2e-2
"""Largest difference from the reference, relative to the largest output."""
_ROTATED_BYTES = 2**28
"""Caches that a timing goes through in turn: several times the last-level cache of any GPU."""


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))(key)


def route(name: str, block_size: int, *, interpret: bool = False) -> Callable[..., jax.Array]:
    """An attention function with the kernels' common arguments: `kernel`, or `cudnn` or `xla` for the dense route."""
    if name == "kernel":
        return functools.partial(gpu.window_attention, block_size=block_size, interpret=interpret)
    return functools.partial(gpu.dense_window_attention, block_size=block_size, implementation=name)


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
    last = reference.visible_until(start + width - 1, block_size)
    live = jnp.int32(min(capacity, int(jnp.maximum(last, until).max()) + 1))
    out = np.asarray(attention(line[:, :width], k, v, start, until, live), np.float32)
    with jax.default_matmul_precision("highest"):
        expected = reference.window_attention(
            *(x.astype(jnp.float32) for x in (line[:, :width], k, v)),
            start,
            until,
            live,
            block_size=block_size,
            tile=128,
        )
    expected = np.asarray(expected)
    other = np.asarray(attention(line[:, :width], k, v, start, until, jnp.int32(capacity)), np.float32)
    later = np.asarray(attention(line[:, 1:], k, v, start + 1, until, jnp.int32(capacity)), np.float32)
    return {
        "error": float(np.abs(out - expected).max() / np.abs(expected).max()),
        "same_live": bool(np.array_equal(out, other)),
        "same_start": bool(np.array_equal(out[:, 1:], later[:, :-1])),
    }


def copy_bandwidth(nbytes: int = 2**30) -> float:
    """Bytes a second that a copy moves, read and written; the best of ten."""
    array = jnp.ones(nbytes // 4, jnp.float32)
    program = jax.jit(lambda x: x * 2)
    return 2 * nbytes / seconds_of(lambda: program(array), calls=5, repeats=10)


def seconds_of(action: Callable[[], Any], *, calls: int, repeats: int) -> float:
    """Seconds a call, the best of `repeats` runs of `calls` calls that do not wait for one another."""
    jax.block_until_ready(action())
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            result = action()
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def time_call(
    attention: Callable[..., jax.Array],
    *,
    heads: tuple[int, int, int],
    width: int,
    context: int,
    capacity: int,
    dtype: str,
    batch: int,
    repeats: int,
) -> float:
    """Seconds of one call at a live length of `context`, in a chain of calls over different caches."""
    query_heads, kv_heads, head_dim = heads
    live_bytes = 2 * batch * kv_heads * context * head_dim * jnp.dtype(dtype).itemsize
    layers = min(max(_ROTATED_BYTES // live_bytes, 4), 48)
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    q = _normal(keys[0], (batch, width, query_heads, head_dim), dtype)
    cache = (batch, kv_heads, capacity, head_dim)
    caches = [tuple(_normal(key, cache, dtype) for key in keys[i : i + 2]) for i in range(1, 2 * layers, 2)]

    @jax.jit
    def chain(q, caches, start, until, live):
        for k, v in caches:
            q = attention(q, k, v, start, until, live)
        return q

    start = jnp.full((batch,), context - width, jnp.int32)
    rest = (start, jnp.zeros_like(start), jnp.int32(context))
    return seconds_of(lambda: chain(q, caches, *rest), calls=5, repeats=repeats) / layers


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench.attention", description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--routes", default="kernel,xla", help="comma-separated, of kernel, cudnn, xla")
    parser.add_argument("--contexts", type=_numbers, default=[1024, 4096, 16384, 32768], help="live cache lengths")
    parser.add_argument("--widths", type=_numbers, default=[1, 8, 72], help="window widths")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=32768, help="of the caches, in positions")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="runs of five calls; the best one counts")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    args = parser.parse_args(argv)
    shapes, routes = args.shapes.split(","), args.routes.split(",")
    if unknown := [name for name in shapes if name not in SHAPES]:
        parser.error(f"--shapes: {unknown[0]!r} is none of {', '.join(SHAPES)}")
    if unknown := [name for name in routes if name not in ("kernel", "cudnn", "xla")]:
        parser.error(f"--routes: {unknown[0]!r} is none of kernel, cudnn, xla")
    if min(args.contexts) < max(args.widths) or max(args.contexts) > args.capacity:
        parser.error("--contexts: each must hold the widest window and fit into --capacity")
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"bench.attention: no GPU here (JAX runs on {device.platform}): nothing was measured. "
            "Without one, tests/kernels/test_gpu.py simulates the kernel and tests/test_gpu_compile.py compiles it.",
            file=sys.stderr,
        )
        return 2
    if "kernel" in routes:
        for name in shapes:
            query_heads, kv_heads, head_dim = SHAPES[name]
            reason = gpu.supports(
                width=max(args.widths),
                heads=query_heads,
                kv_heads=kv_heads,
                capacity=args.capacity,
                head_dim=head_dim,
                dtype=args.dtype,
                device=device,
            )
            if reason:
                parser.error(f"--routes kernel, {name}: {reason} (--routes cudnn,xla works on other GPUs)")

    checks, ok = [], True
    cases = [(name, shape, width) for name in routes for shape in shapes for width in args.widths]
    for index, (name, shape, width) in enumerate(tqdm(cases, desc="numerics", unit="case")):
        block_size = (1, 32)[index % 2]
        found = numerics(
            route(name, block_size),
            heads=SHAPES[shape],
            width=width,
            capacity=4096,
            dtype=args.dtype,
            block_size=block_size,
            seed=index,
        )
        checks.append({"route": name, "shape": shape, "width": width, "block_size": block_size} | found)
        kept = name != "kernel" or (found["same_live"] and found["same_start"])
        if found["error"] > TOLERANCE or not kept:
            ok = False
            print(f"WRONG: {checks[-1]}", file=sys.stderr)
    print(
        f"numerics: {len(checks)} cases, largest error {max(c['error'] for c in checks):.1e}, {'ok' if ok else 'WRONG'}"
    )

    bandwidth = copy_bandwidth()
    print(f"{device.device_kind}: copies move {bandwidth / 1e9:.0f} GB/s")
    print(
        f"{'shape':16} {'context':>8} {'rows':>5} {'floor':>9} "
        + " ".join(f"{name:>9} {'ratio':>6}" for name in routes)
    )
    rows = []
    cases = [(shape, context, width) for shape in shapes for context in args.contexts for width in args.widths]
    for shape, context, width in tqdm(cases, desc="timing", unit="case"):
        heads = SHAPES[shape]
        floor = 2 * args.batch * heads[1] * context * heads[2] * jnp.dtype(args.dtype).itemsize / bandwidth
        taken = {
            name: time_call(
                route(name, 1),
                heads=heads,
                width=width,
                context=context,
                capacity=args.capacity,
                dtype=args.dtype,
                batch=args.batch,
                repeats=args.repeats,
            )
            for name in routes
        }
        rows.append({"shape": shape, "context": context, "width": width, "floor": floor, "seconds": taken})
        times = " ".join(f"{seconds * 1e6:7.1f}us {seconds / floor:6.2f}" for seconds in taken.values())
        tqdm.write(f"{shape:16} {context:8} {width:5} {floor * 1e6:7.1f}us {times}")
    report = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "dtype": args.dtype,
        "batch": args.batch,
        "capacity": args.capacity,
        "copy_bytes_per_second": bandwidth,
        "numerics": checks,
        "numerics_ok": ok,
        "times": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
