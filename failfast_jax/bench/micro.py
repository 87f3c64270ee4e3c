"""The engine's own costs, as ratios taken in one run.

- speed: `vanilla` against greedy generation of Hugging Face transformers (float32, same weights, same prompts), and
  against the memory limit (bytes of weights over the measured read bandwidth);
- widths: what a verify of W rows costs, in one-row steps;
- prefill: tokens a second of prompts by their length (not by default);
- overhead: what a round spends outside model passes;
- plain: what a round costs that drafts nothing, by method, in those of `vanilla`;
- drafting: what a draft of the default drafter costs, beside the reading of its weights, and what of it is its Markov
  head;
- programs: operations and memory of a round's two programs, by the compiler's own count (not by default);
- serving: tokens a second of a queue of requests by rows, with and without drafts, seconds to the first token, and what
  a request costs (not by default);
- startup: seconds from the start of a second process to its first token, with a warm compile cache;
- cpu: the CPU's own kernels beside XLA's operations (not by default);
- attention: numerics and times of the attention kernel, on an NVIDIA GPU (by default where there is one).

Timings of things that are compared are interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from failfast_jax import decoding
from failfast_jax.bench import cpu_kernels, hf_reference, kernel_timing
from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.bench.drafting import drafting_report
from failfast_jax.bench.replay_programs import Models, OnDevice, compiled, start_of, verify_program
from failfast_jax.bench.serving import serving_report
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Plan, buffer_length
from failfast_jax.defaults import load_pair
from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.public_data.model_shapes import hollow, nbytes
from failfast_jax.public_data.question_sets import PROMPTS
from failfast_jax.runtime.model_runtime import Request, Session
from failfast_jax.util import hardware
from failfast_jax.util.files import user_path, write_atomically

PARTS = (
    "speed",
    "widths",
    "overhead",
    "plain",
    "drafting",
    "startup",
    "attention",
    "serving",
    "programs",
    "prefill",
    "cpu",
)
BY_DEFAULT = PARTS[:-5]
"""And `attention` on a GPU."""
WIDTHS = (1, 4, 8, 16, 32, 64)
CONTEXT = 256
"""Live cache length of the verify timings."""
STEPS = 20
"""Verifies in a timed run."""
REPEATS = 9
"""Timed turns of the verifies, and three times those of whole answers."""
BATCHES = (4, 8, 16)
TOKENS = 64
"""New tokens of an answer."""
PROMPT_TOKENS = (64, 128, 256, 512, 2048, 7000)


def widths_report(target: Decoder) -> dict[str, Any]:
    """Milliseconds of a verify by width, and the cost of each in one-row steps."""
    capacity = CONTEXT + max(WIDTHS) + 1
    tokens = np.random.default_rng(0).integers(0, target.config.vocab_size, CONTEXT)
    length = buffer_length(capacity, Drafter(), Plan((max(WIDTHS),), (max(WIDTHS),), (max(WIDTHS),)))
    device = OnDevice(Models(target, None), (target.init_cache(1, length),), start_of(tokens))
    programs = {width: compiled(verify_program, capacity=capacity, width=width) for width in WIDTHS}
    acts = {width: functools.partial(device.run, program, np.int32(STEPS)) for width, program in programs.items()}
    seconds = {width: found / STEPS for width, found in medians(interleaved(acts, REPEATS)).items()}
    return {
        "context": CONTEXT,
        "ms": {width: 1e3 * seconds[width] for width in WIDTHS},
        "one_row_steps": {width: seconds[width] / seconds[1] for width in WIDTHS},
    }


def prefill_report(engine: FailFast) -> dict[str, Any]:
    """Milliseconds and tokens a second of one prompt's prefill by the target, by tokens: medians."""
    rng, out = np.random.default_rng(0), {}
    drafter = engine.build_drafter(GenerationConfig("vanilla"))
    for tokens in PROMPT_TOKENS:
        session = engine.runtime.session(drafter, capacity=engine.runtime.capacity(tokens + 1, 1, 1))
        # The last token is not prefilled: the first step reads it.
        request = Request(rng.integers(0, engine.target.config.vocab_size, tokens + 1).tolist(), 1)
        seconds = medians(interleaved({"prefill": functools.partial(session.prefill, [request])}, REPEATS))["prefill"]
        out[str(tokens)] = {"ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
    return out


def overhead_report(engine: FailFast) -> dict[str, Any]:
    """Milliseconds that a round spends outside model passes, at most.

    The same compiled loop around a target and a drafter of one layer and 16 channels: what is left of a
    round's time is bookkeeping, and the passes of those models. Once with a vocabulary of 512, and once
    with the real one, which adds the argmax and confidence over the logits.
    """
    out = {}
    tokenizers = {"tokenizer": engine.tokenizer, "drafter_tokenizer": engine.tokenizer}  # one row more is no mismatch
    for vocab in (512, engine.target.config.vocab_size):
        target = Decoder(hollow(engine.target.config, vocab), rngs=nnx.Rngs(0))
        tiny = FailFast(target, as_untrained_drafter(target), **tokenizers)
        for method in ("vanilla", "lookup", "auto"):
            config = GenerationConfig(method, max_new_tokens=128, ignore_eos=True)
            stats = [tiny.generate([list(range(100, 164))], config)[0].stats for _ in range(4)]
            seconds = float(np.median([one.decode_s / one.rounds for one in stats[1:]]))
            out[f"{method}_round_ms_vocab_{vocab}"] = 1e3 * seconds
    return out


def plain_report() -> dict[str, Any]:
    """Milliseconds of a round that drafts nothing, because it would not pay; medians of interleaved turns."""
    engine, turns = load_pair(method="auto"), 3 * REPEATS
    request = Request(engine.encode(PROMPTS[0]), STEPS * (turns + 2))
    capacity = engine.runtime.capacity(len(request.prompt), request.max_new_tokens, 16)
    acts = {}
    for method in ("vanilla", "auto"):
        session = engine.runtime.session(engine.build_drafter(GenerationConfig(method)), capacity=capacity)
        if session.drafter.shape.uses_costs:
            dear = np.asarray([1.0, *[1e3] * (len(session.plan.widths) - 1)], np.float32)
            session = session.with_costs(Costs(dear, np.float32(1e3), np.int32(0), np.int32(0)))
        acts[method] = functools.partial(_go_on, session, [session.prefill([request])])
    times = interleaved(acts, turns)
    ratios = {method: float(np.median(np.divide(times[method], times["vanilla"]))) for method in acts}
    return {"ms": {m: 1e3 * s / STEPS for m, s in medians(times).items()}, "in_steps_of_vanilla": ratios}


def _go_on(session: Session, place: list[Any]) -> jax.Array:
    """`STEPS` more rounds of the state in `place`."""
    place[0] = session.advance(place[0], STEPS)
    return place[0].length


def speed_report(engine: FailFast) -> dict[str, Any]:
    """Tokens a second of `vanilla` and of transformers on the same prompts, prefill excluded from both."""
    config = GenerationConfig(method="vanilla", max_new_tokens=TOKENS, ignore_eos=True)
    bandwidth, size = hardware.bandwidth(2**29)["read"], nbytes(engine.target)
    out: dict[str, Any] = {
        "weight_bytes": size,
        "read_bandwidth_bytes_per_s": bandwidth,
        "memory_limit_tokens_per_s": bandwidth / size,
    }
    try:
        model = hf_reference.load_smollm2(default_target_path())
    except ModuleNotFoundError as error:
        model, out["transformers"] = None, str(error)
    ours, theirs = [], []
    for turn in range(REPEATS // 3 + 1):
        for prompt in map(engine.encode, PROMPTS):
            speed = engine.generate([prompt], config)[0].stats.tokens_per_s
            ours += [speed] if turn else []
            if model is not None:
                whole = hf_reference.greedy(model, prompt, TOKENS, stop_at_eos=False)[2]
                first = hf_reference.greedy(model, prompt, 1, stop_at_eos=False)[2]
                theirs += [(TOKENS - 1) / (whole - first)] if turn else []
    out["vanilla_tokens_per_s"] = float(np.median(ours))
    out["share_of_memory_limit"] = out["vanilla_tokens_per_s"] / out["memory_limit_tokens_per_s"]
    if theirs:
        out["transformers_tokens_per_s"] = float(np.median(theirs))
        out["vanilla_over_transformers"] = out["vanilla_tokens_per_s"] / out["transformers_tokens_per_s"]
    return out


def programs_report(engine: FailFast) -> dict[str, Any]:
    """Operations and memory of a round's programs by method, after a prompt of `CONTEXT` tokens."""
    configs = {method: GenerationConfig(method, max_new_tokens=TOKENS) for method in ("vanilla", "auto")}
    return {method: program_costs(engine, config, CONTEXT) for method, config in configs.items()}


def program_costs(engine: FailFast, config: GenerationConfig, prompt_tokens: int) -> dict[str, float | None]:
    """Operations and memory of a round, as the compiler reports them; None where this backend does not.

    Returns:
      `pass_flops` of one drafter pass (a loop's body counts once), `verify_flops`, and `bytes`: both models (shared
      arrays count once), the state, and results and temporaries of the larger program.
    """
    session = engine.session([[0] * prompt_tokens], engine.resolve(config))
    drafter, state = session.drafter, session.shapes
    proposal, _ = jax.eval_shape(decoding.draft, drafter, state)
    verify = functools.partial(decoding.verify, plan=session.plan)
    programs = [(decoding.draft, (drafter, state)), (verify, (engine.target, drafter, state, proposal))]
    pass_flops, verify_flops = (_flops(function, arguments) for function, arguments in programs)
    added = []
    for function, arguments in programs:
        memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
        added.append(memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes)
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves((engine.target, drafter, state))}
    return {
        "pass_flops": pass_flops if drafter.max_draft else None,
        "verify_flops": verify_flops,
        "bytes": sum(map(hardware.bytes_on_a_device, arrays.values())) + max(added),
    }


def _flops(function: Callable, arguments: Sequence[Any]) -> float | None:
    """Floating-point operations by XLA's count, with its own operations in place of our kernels."""
    from failfast_jax.kernels import llvm_emitter  # brings LLVM

    jax.clear_caches()  # traces with our kernels would be taken for those without, and the other way round
    with llvm_emitter.unused():
        analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    jax.clear_caches()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    return (analysis or {}).get("flops")


def startup_report() -> dict[str, Any]:
    """Seconds from process start to the first printed token, per method, compile cache warm."""
    import pty

    out = {}
    for method in ("vanilla", "lookup", "auto"):
        seconds = []
        for _ in range(3):
            reader, writer = pty.openpty()  # a terminal, so that the answer streams
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "failfast_jax.generate", "--method", method, "--prompt", PROMPTS[0]],
                stdout=writer,
                stderr=subprocess.DEVNULL,
            )
            os.close(writer)
            os.read(reader, 1)
            seconds.append(time.perf_counter() - start)
            process.wait()
            os.close(reader)
        out[f"{method}_first_token_s"] = float(np.median(seconds[1:]))
    return out


def small_engine() -> FailFast:
    """The default target; it drafts itself, untrained: any block-diffusion drafter spends the same passes."""
    plain = load_pair(method="vanilla")
    untrained = as_untrained_drafter(plain.target)
    return FailFast(plain.target, untrained, tokenizer=plain.tokenizer, drafter_tokenizer=plain.tokenizer)


def work(args: argparse.Namespace) -> int:
    """Runs the parts that were asked for; prints each as it is done, and all as JSON at the end.

    Returns:
      1 if the attention kernel is wrong.
    """
    on_gpu = jax.default_backend() == "gpu"
    default = [*BY_DEFAULT, *(["attention"] if on_gpu else [])]
    wanted = default if args.parts is None else args.parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise ValueError(f"--parts: {', '.join(unknown)}: must be among {', '.join(PARTS)}")
    if "attention" in wanted:
        kernel_timing.check()
    engine = functools.cache(small_engine)
    jobs = {
        "speed": lambda: speed_report(engine()),
        "widths": lambda: widths_report(engine().target),
        "overhead": lambda: overhead_report(engine()),
        "prefill": lambda: prefill_report(engine()),
        "plain": plain_report,
        "drafting": lambda: drafting_report(pair := load_pair(method="auto"), pair.encode(PROMPTS[0])),
        "startup": startup_report,
        "attention": kernel_timing.report,
        "cpu": lambda: cpu_kernels.report(engine().target),
        "programs": lambda: programs_report(load_pair(method="auto")),
        "serving": lambda: serving_report(load_pair(method="auto"), PROMPTS, (1, *BATCHES), TOKENS),
    }
    report: dict[str, Any] = {"machine": hardware.machine()}
    for part in wanted:
        report[part] = jobs[part]()
        if part != "attention":
            print(f"{part}: {json.dumps(report[part], indent=1)}", file=sys.stderr, flush=True)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, text + "\n")
    return 0 if report.get("attention", {}).get("numerics_ok", True) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)} (default: what can be run here)")
    parser.add_argument("--out", type=user_path, help="write the JSON there")
