"""Plain decoding beside the memory's limit and beside other programs, and attention kernels checked and timed.

Each part but `peers` is a function of the loaded pair; a function's docstring is the part's help.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.bench.peers import LOADING, PeerOptions, compare_peers, peer_table
from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.kernel_table import KERNELS, SIMULATED_TPU, attend, refusal
from failfast_jax.load_options import LoadOptions
from failfast_jax.models import quantization
from failfast_jax.models.attention_check import check_attention, is_right
from failfast_jax.models.kv_cache import round_up
from failfast_jax.options import add_flags_of
from failfast_jax.public_data.question_sets import PROMPTS, everyday_prompts, humaneval_prompts
from failfast_jax.request_flags import add_flags_named
from failfast_jax.util import hardware
from failfast_jax.util.files import user_path, write_json
from failfast_jax.util.progress import progress_bar

REPEATS = 4
"""Answers of a part; the first one compiles and is not counted."""
TOKENS = 64
"""New tokens per answer."""
ANSWERED, ANSWER = 32, 128
"""Of `rounding`: HumanEval's prompts beside the everyday ones, and tokens of an answer."""
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
TIMED_ROWS, CONTEXTS = (1, 8, 72), (1024, 8192, 32768)
"""Timed windows: rows, and live positions with them."""
CPU_CONTEXTS = (512, 2048, 7168)
LAYERS = 8
"""Caches that a timed run goes through, so that little of one is left in the processor's own cache."""


def speed(pair: FailFast) -> dict[str, Any]:
    """Speed of `vanilla` beside the memory's limit: its bandwidth over the bytes of the weights."""
    config = GenerationConfig("vanilla", max_new_tokens=TOKENS, ignore_eos=True)
    answers = [pair.generate(list(PROMPTS[:1]), config)[0] for _ in range(REPEATS)]
    tokens_per_s = float(np.median([answer.stats.tokens_per_s for answer in answers[1:]]))
    bandwidth, size = hardware.bandwidth(2**29)["read"], hardware.bytes_on_a_device(pair.target)
    return {
        "weight_bytes": size,
        "read_bandwidth_bytes_per_s": bandwidth,
        "memory_limit_tokens_per_s": bandwidth / size,
        "vanilla_tokens_per_s": tokens_per_s,
        "share_of_memory_limit": tokens_per_s * size / bandwidth,
    }


def rounding(pair: FailFast) -> dict[str, Any]:
    """Cost of int8 activations: next tokens of float32's own answers, as they are predicted in either arithmetic."""
    float32, int8 = (
        quantization.with_activations({"target": pair.target}, kind)["target"] for kind in ("float32", "int8")
    )
    engine = FailFast.load(float32, tokenizer=pair.tokenizer, method="vanilla")
    report = {}
    for name, prompts in {"humaneval": humaneval_prompts(ANSWERED), "everyday": everyday_prompts()}.items():
        agreed, divergence = [], []
        for prompt in progress_bar(f"answers to {name}", "answer", prompts):
            [answer] = engine.generate([prompt], method="vanilla", max_new_tokens=ANSWER)
            ids, begin = [answer.prompt_ids + answer.output_ids], len(answer.prompt_ids) - 1
            p, q = (jax.nn.log_softmax(model.logits(ids)[0, begin:-1]) for model in (float32, int8))
            agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
            divergence += jnp.sum(jnp.exp(p) * (p - q), axis=-1).tolist()
        figures = {"top1_agreement": float(np.mean(agreed)), "mean_kl_nats": float(np.mean(divergence))}
        report[name] = {"answers": len(prompts), "tokens": len(agreed), **figures}
    return report


def kernels(pair: FailFast) -> dict[str, Any]:
    """Checks of attention kernels against plain jnp: public models' shapes; on a CPU the default target's."""
    config = pair.target.config
    heads = {"default target": (config.num_heads, config.num_kv_heads, config.head_dim)}
    checks = check_shapes(heads if jax.default_backend() == "cpu" else SHAPES, WINDOWS)
    return {"right": all(check["right"] for check in checks), "checks": checks}


def attention(pair: FailFast) -> dict[str, Any]:
    """Milliseconds per layer of each attention kernel that serves here, beside the reading of keys and values."""
    config, on_cpu = pair.target.config, jax.default_backend() == "cpu"
    shapes = {"default target": (config.num_heads, config.num_kv_heads, config.head_dim)} if on_cpu else SHAPES
    dtype = jnp.dtype(pair.target.dtype if on_cpu else jnp.bfloat16)
    bandwidth, times = hardware.bandwidth(2**29)["read"], []
    cases = [(name, live) for name in shapes for live in (CPU_CONTEXTS if on_cpu else CONTEXTS)]
    for name, live in progress_bar("attention", "case", cases):
        _, kv_heads, head_dim = shapes[name]
        layer_bytes = 2 * kv_heads * live * head_dim * dtype.itemsize
        model = {"dtype": dtype, "head_dim": head_dim}
        served = [
            kernel for kernel in KERNELS if kernel != SIMULATED_TPU and not refusal(kernel, jax.devices()[0], **model)
        ]
        for rows in TIMED_ROWS:
            case = {"shape": name, "rows": rows, "live": live, "reading_ms": 1e3 * layer_bytes / bandwidth}
            ms = {kernel: time_attention(shapes[name], rows, live, dtype, kernel) for kernel in served}
            times.append({**case, "ms": ms})
    return {"read_bandwidth_bytes_per_s": bandwidth, "times": times}


def time_attention(shape: tuple[int, int, int], rows: int, live: int, dtype: jnp.dtype, kernel: str) -> float:
    """Returns the median milliseconds of one layer's `attend` (rotate, write, attend), in a run over `LAYERS` caches.

    Args:
      shape: one of `SHAPES`.
      rows: number of rows of the window, the last of the `live` positions.
    """
    heads, kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    cache_shape = (1, kv_heads, round_up(live, 256), head_dim)
    written = [jax.random.normal(key, cache_shape, dtype) for key in keys[:-1]]
    caches = list(zip(written[::2], written[1::2]))
    qkv = jax.random.normal(keys[-1], (1, rows, kv_heads, heads // kv_heads + 2, head_dim), dtype)
    angles = jnp.ones((1, rows, 1, head_dim // 2), jnp.float32)
    window = Window(jnp.cos(angles), jnp.sin(angles), jnp.asarray([live - rows]), jnp.int32(live))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(qkv: jax.Array, caches: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, Any]:
        written = []
        for cache in caches:  # each layer waits for the one before
            outputs, cache = attend(qkv, cache, window, kernel=kernel)
            qkv = qkv + 1e-9 * outputs[:, :, :1, None]
            written.append(cache)
        return qkv, written

    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        outputs, caches = run(qkv, caches)
        outputs.block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(seconds[1:])) / LAYERS


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


PEERS = "peers"
PARTS = {part.__name__: part for part in (speed, kernels, attention, rounding)} | {PEERS: compare_peers}


def work(args: argparse.Namespace) -> int:
    """Runs the chosen parts; prints each as it is done, and all as JSON at the end.

    Returns:
      1 if an attention kernel is wrong.

    Raises:
      ValueError: an unknown part.
    """
    default = ["speed", *(["kernels", "attention"] if jax.default_backend() == "gpu" else [])]
    names = default if args.parts is None else args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--parts: {', '.join(unknown)}: must be among {', '.join(PARTS)}")
    pair, report = PeerOptions.given(args), {"machine": hardware.machine()}
    load = functools.cache(lambda: FailFast.load(pair.target, pair.drafter, LoadOptions.given(args), method="auto"))
    for name in names:
        report[name] = compare_peers(args) if name == PEERS else PARTS[name](load())
        shown = peer_table(report[name]) if name == PEERS else f"{name}: {json.dumps(report[name], indent=1)}"
        print(shown, file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, report)
    return 0 if report.get("kernels", {}).get("right", True) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    lines = (f"  {name:<10}{inspect.getdoc(part).splitlines()[0]}" for name, part in PARTS.items())
    parser.description = "\n".join([f"{parser.description}", "Parts:", *lines])
    parser.add_argument("--parts", help="comma-separated (default: speed; on a GPU also kernels and attention)")
    add_flags_of(parser, PeerOptions)
    add_flags_named(parser, *LOADING)
    parser.add_argument("--out", metavar="FILE", type=user_path, help="write the JSON there")
