"""The engine's own costs, as ratios taken in one run.

Each part is a function of `MicroModels`; its docstring is the part's help. Timings of things that are compared are
interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from failfast_jax.bench import hf_reference
from failfast_jax.bench.kernel_timing import kernel_report, kernel_table
from failfast_jax.bench.replay_programs import Models, OnDevice, compiled, start_of, verify_program
from failfast_jax.bench.timing import interleaved, median_ms, medians
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Plan, buffer_length
from failfast_jax.drafters.feature_block import DSparkDrafter
from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.public_data.model_shapes import minimal_model, nbytes
from failfast_jax.public_data.question_sets import PROMPTS
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.serving.queue import Finished, Queue
from failfast_jax.util import hardware
from failfast_jax.util.files import user_path, write_atomically

WIDTHS = (1, 4, 8, 16, 32, 64)
CONTEXT = 256
"""Live cache length of the timed verifies."""
STEPS = 20
"""Verifies, rounds or drafts in a timed run."""
REPEATS = 9
"""Timed turns."""
ROWS = (1, 4, 8, 16)
"""Rows of the queues of `serving`."""
TOKENS = 64
"""New tokens per answer."""
PROMPT_TOKENS = (64, 128, 256, 512, 2048, 7000)
METHODS = ("vanilla", "auto")


class MicroModels:
    """The default pair, and a cheaper one for parts in which it does not matter what is drafted; loaded on demand."""

    @functools.cached_property
    def pair(self) -> FailFast:
        """The default pair."""
        return FailFast.load(method="auto")

    @functools.cached_property
    def self_drafting(self) -> FailFast:
        """The default target, which drafts for itself, untrained: any block-diffusion drafter spends its passes."""
        plain = FailFast.load(method="vanilla")
        tokenizers = {"tokenizer": plain.tokenizer, "drafter_tokenizer": plain.tokenizer}
        return FailFast(plain.target, as_untrained_drafter(plain.target), **tokenizers)


def speed(models: MicroModels) -> dict[str, Any]:
    """Speed of `vanilla` beside transformers (float32, same weights and prompts) and beside the memory's limit."""
    engine, ours, theirs = models.self_drafting, [], []
    config = GenerationConfig(method="vanilla", max_new_tokens=TOKENS, ignore_eos=True)
    bandwidth, size = hardware.bandwidth(2**29)["read"], nbytes(engine.target)
    report: dict[str, Any] = {"weight_bytes": size, "read_bandwidth_bytes_per_s": bandwidth}
    report["memory_limit_tokens_per_s"] = bandwidth / size
    try:
        model = hf_reference.load_smollm2(default_target_path())
    except ModuleNotFoundError as error:
        model, report["transformers"] = None, str(error)
    for turn in range(REPEATS // 3 + 1):
        for prompt in map(engine.encode, PROMPTS):
            tokens_per_s = engine.generate([prompt], config)[0].stats.tokens_per_s
            ours += [tokens_per_s] if turn else []
            if model is not None:  # both without their prefill
                all_s, first_s = (hf_reference.greedy(model, prompt, n, stop_at_eos=False)[2] for n in (TOKENS, 1))
                theirs += [(TOKENS - 1) / (all_s - first_s)] if turn else []
    report["vanilla_tokens_per_s"] = float(np.median(ours))
    report["share_of_memory_limit"] = report["vanilla_tokens_per_s"] / report["memory_limit_tokens_per_s"]
    if theirs:
        report["transformers_tokens_per_s"] = float(np.median(theirs))
        report["vanilla_over_transformers"] = report["vanilla_tokens_per_s"] / report["transformers_tokens_per_s"]
    return report


def widths(models: MicroModels) -> dict[str, Any]:
    """Cost of a verify by its rows, in single-token steps."""
    target: Decoder = models.self_drafting.target
    capacity = CONTEXT + max(WIDTHS) + 1
    tokens = np.random.default_rng(0).integers(0, target.config.vocab_size, CONTEXT)
    length = buffer_length(capacity, Drafter(), Plan((max(WIDTHS),), (max(WIDTHS),), (max(WIDTHS),)))
    device = OnDevice(Models(target, None), (target.init_cache(1, length),), start_of(tokens))
    programs = {width: compiled(verify_program, capacity=capacity, width=width) for width in WIDTHS}
    actions = {width: functools.partial(device.run, program, np.int32(STEPS)) for width, program in programs.items()}
    ms = median_ms(actions, REPEATS, per=STEPS)
    return {"context": CONTEXT, "ms": ms, "one_row_steps": {width: ms[width] / ms[1] for width in WIDTHS}}


def overhead(models: MicroModels) -> dict[str, Any]:
    """Milliseconds of a round outside model passes, at most, by method.

    The same compiled loop runs around a target and a drafter of one layer and 16 channels. What is left of a round's
    time is bookkeeping and the passes of those models. The real vocabulary adds the argmax and the confidence.
    """
    engine, report = models.self_drafting, {}
    tokenizers = {"tokenizer": engine.tokenizer, "drafter_tokenizer": engine.tokenizer}  # one row more is no mismatch
    for vocab in (512, engine.target.config.vocab_size):
        target = Decoder(minimal_model(engine.target.config, vocab), rngs=nnx.Rngs(0))
        tiny = FailFast(target, as_untrained_drafter(target), **tokenizers)
        for method in ("vanilla", "lookup", "auto"):
            config = GenerationConfig(method, max_new_tokens=128, ignore_eos=True)
            stats = [tiny.generate([list(range(100, 164))], config)[0].stats for _ in range(4)]
            ms = 1e3 * np.median([answer.decode_s / answer.rounds for answer in stats[1:]])
            report[f"{method}_round_ms_vocab_{vocab}"] = float(ms)
    return report


def plain(models: MicroModels) -> dict[str, Any]:
    """Cost of a round that drafts nothing because no draft pays, in rounds of `vanilla`."""
    engine, turns, actions = models.pair, 3 * REPEATS, {}
    request = Request(engine.encode(PROMPTS[0]), STEPS * (turns + 2))
    capacity = engine.runtime.capacity(len(request.prompt), request.max_new_tokens, 16)
    for method in METHODS:
        session = engine.runtime.session(engine.build_drafter(GenerationConfig(method)), capacity=capacity)
        if session.drafter.shape.uses_costs:
            verify = np.asarray([1.0, *[1e3] * (len(session.plan.widths) - 1)], np.float32)
            session = session.with_costs(Costs(verify, np.float32(1e3), np.int32(0), np.int32(0)))
        states = [session.prefill([request])]

        def advance(session: Any = session, states: list[Any] = states) -> jax.Array:
            states[0] = session.advance(states[0], STEPS)
            return states[0].length

        actions[method] = advance
    times = interleaved(actions, turns)
    ratio = float(np.median(np.divide(times["auto"], times["vanilla"])))
    return {"ms": {method: 1e3 * s / STEPS for method, s in medians(times).items()}, "in_steps_of_vanilla": ratio}


def drafting(models: MicroModels) -> dict[str, Any]:
    """Milliseconds of a draft of the default drafter, with and without its heads, beside the reading of its weights."""
    engine = models.pair
    model, actions = engine.drafter, {}
    rows = {"spec_len": model.rows, "max_spec_len": model.rows}
    request = Request(engine.encode(PROMPTS[0]), 2 * model.rows)
    capacity = engine.runtime.capacity(len(request.prompt), request.max_new_tokens, model.rows)
    for name, network in (("draft", model), ("without_heads", model.without_heads())):
        drafter = DSparkDrafter(model=network, **rows)
        state = engine.runtime.session(drafter, capacity=capacity, decodes=False).prefill([request])
        actions[name] = functools.partial(repeat_draft, drafter, state.drafter, state.committed, STEPS)
    ms = median_ms(actions, REPEATS, per=STEPS)
    read = nbytes((nnx.state(model.network), model.head))
    if model.network.markov is not None:
        read -= nbytes(model.network.markov.w1[...])  # a pass reads one row of it
    ms["reading"] = 1e3 * read / hardware.bandwidth(2**29)["read"]
    return {"rows": model.rows, "weight_bytes": read, "ms": ms, "over_reading": ms["draft"] / ms["reading"]}


@jax.jit
def repeat_draft(drafter: Drafter, state: Any, committed: Any, count: ArrayLike) -> tuple[Any, jax.Array]:
    """Drafts `count` times from one place, one draft after the other."""

    def is_cache(value: Any) -> bool:
        return isinstance(value, KVCache)

    def body(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        before, total = carry
        draft, after = drafter.draft(before, committed)
        # Each draft begins where the first one began; only the caches, which are large, are handed on.
        state = jax.tree.map(lambda new, old: new if is_cache(new) else old, after, before, is_leaf=is_cache)
        return state, total + draft.tokens.sum() + draft.confidence.sum()

    return jax.lax.fori_loop(0, count, body, (state, jnp.float32(0)))


def startup(models: MicroModels) -> dict[str, Any]:
    """Seconds from the start of a process to its first token, by method, with a warm compile cache."""
    import pty

    report = {}
    for method in ("vanilla", "lookup", "auto"):
        command = [sys.executable, "-m", "failfast_jax.generate", "--method", method, "--prompt", PROMPTS[0]]
        seconds = []
        for _ in range(3):
            reader, writer = pty.openpty()  # a terminal, so that the answer streams
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL)
            os.close(writer)
            os.read(reader, 1)
            seconds.append(time.perf_counter() - begin)
            process.wait()
            os.close(reader)
        report[f"{method}_first_token_s"] = float(np.median(seconds[1:]))
    return report


def kernels(models: MicroModels) -> dict[str, Any]:
    """Checks of attention kernels; their times and those of the CPU's products beside XLA's (by default on a GPU)."""
    report = kernel_report(models.self_drafting.target)
    print(kernel_table(report), file=sys.stderr)
    return report


def prefill(models: MicroModels) -> dict[str, Any]:
    """Milliseconds and tokens per second of the target's prefill, by the prompt's tokens."""
    engine, rng, report = models.self_drafting, np.random.default_rng(0), {}
    drafter = engine.build_drafter(GenerationConfig("vanilla"))
    for tokens in PROMPT_TOKENS:
        session = engine.runtime.session(drafter, capacity=engine.runtime.capacity(tokens + 1, 1, 1))
        # The last token is not prefilled: the first step reads it.
        request = Request(rng.integers(0, engine.target.config.vocab_size, tokens + 1).tolist(), 1)
        ms = median_ms({"prefill": functools.partial(session.prefill, [request])}, REPEATS)["prefill"]
        report[str(tokens)] = {"ms": ms, "tokens_per_s": 1e3 * tokens / ms}
    return report


def serving(models: MicroModels) -> dict[str, Any]:
    """Tokens per second of a queue by rows, with and without drafts; seconds to the first token and per request."""
    report = {}
    for rows in ROWS:
        report[str(rows)] = queue_report(models.pair, rows, TOKENS)
        print(f"rows {rows}: {json.dumps(report[str(rows)])}", file=sys.stderr, flush=True)
    return report


def queue_report(engine: FailFast, rows: int, tokens: int, turns: int = 3) -> dict[str, Any]:
    """Fills a queue of `rows` rows by each method in turn, with twice as many requests: rows are filled again while
    others decode."""
    speeds: dict[str, list[float]] = {method: [] for method in METHODS}
    finished: dict[str, list[Finished]] = {method: [] for method in METHODS}

    def fill(method: str) -> None:
        begin, queue = time.perf_counter(), queues[method]
        requests = [queue.submit(PROMPTS[number % len(PROMPTS)]) for number in range(2 * rows)]
        answers = [request.result() for request in requests]
        speeds[method].append(sum(len(answer.output_ids) for answer in answers) / (time.perf_counter() - begin))
        finished[method][:] = answers

    def spent_outside(queue: Queue) -> float:
        """Seconds of a request of one token outside its slice: prefill, queue and text."""
        begin, decoded = time.perf_counter(), queue.scheduler.counts.decode_s
        queue.submit(PROMPTS[0], max_new_tokens=1).result()
        return time.perf_counter() - begin - (queue.scheduler.counts.decode_s - decoded)

    with contextlib.ExitStack() as stack:
        configs = {method: GenerationConfig(method, max_new_tokens=tokens, ignore_eos=True) for method in METHODS}
        options = {"batch": rows, "capacity": 512, "reuse": False}
        queues = {m: stack.enter_context(Queue(engine, config, **options)) for m, config in configs.items()}
        interleaved({method: functools.partial(fill, method) for method in METHODS}, turns)
        report: dict[str, Any] = {}
        for method, queue in queues.items():
            alone = [queue.submit(PROMPTS[0]).result().first_s for _ in range(turns + 1)]
            rounds = sum(len(answer.rounds) for answer in finished[method])
            report[method] = {
                "tokens_per_s": float(np.median(speeds[method][1:])),
                "accepted_per_round": sum(answer.accepted for answer in finished[method]) / rounds,
                "first_token_s": float(np.median([answer.first_s for answer in finished[method]])),
                "first_token_alone_s": float(np.median(alone[1:])),
                "request_overhead_s": float(np.median([spent_outside(queue) for _ in range(2 * turns)][1:])),
            }
    ratios = np.divide(speeds["auto"][1:], speeds["vanilla"][1:])
    return {**report, "speedup": float(np.median(ratios))}


Part = Callable[[MicroModels], dict[str, Any]]
DEFAULT: tuple[Part, ...] = (speed, widths, overhead, plain, drafting, startup)
"""Parts that run without `--parts`; on a GPU `kernels`, too."""
PARTS: dict[str, Part] = {part.__name__: part for part in (*DEFAULT, kernels, serving, prefill)}


def work(args: argparse.Namespace) -> int:
    """Runs the chosen parts; prints each as it is done, and all as JSON at the end.

    Returns:
      1 if an attention kernel is wrong.

    Raises:
      ValueError: an unknown part.
    """
    default = [part.__name__ for part in DEFAULT]
    default += ["kernels"] if jax.default_backend() == "gpu" else []
    names = default if args.parts is None else args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--parts: {', '.join(unknown)}: must be among {', '.join(PARTS)}")
    models, report = MicroModels(), {"machine": hardware.machine()}
    for name in names:
        report[name] = PARTS[name](models)
        print(f"{name}: {json.dumps(report[name], indent=1)}", file=sys.stderr, flush=True)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, text + "\n")
    return 0 if report.get("kernels", {}).get("right", True) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    lines = (f"  {name:<10}{inspect.getdoc(part).splitlines()[0]}" for name, part in PARTS.items())
    parser.description = "\n".join([f"{parser.description}", "Parts:", *lines])
    default = ",".join(part.__name__ for part in DEFAULT)
    parser.add_argument("--parts", help=f"comma-separated (default: {default}; on a GPU kernels, too)")
    parser.add_argument("--out", metavar="FILE", type=user_path, help="write the JSON there")
