"""`python -m failfast_jax.bench.engine`: the engine's own costs, as ratios taken in one run.

- `vanilla` against greedy generation of Hugging Face transformers (float32, same weights, same prompts), and
  against the memory limit (bytes of weights over the measured read bandwidth);
- what a verify of W rows costs, in one-row steps;
- what a round spends outside model passes;
- drafter passes per round of the schedule `wide`;
- seconds from the start of a second process to its first token, with a warm compile cache.

Timings of things that are compared are interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from failfast_jax.bench.prompts import PROMPTS
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding import Drafter, round
from failfast_jax.decoding.state import Draft
from failfast_jax.defaults import load_pair
from failfast_jax.engine import FailFast
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.transformer import Decoder
from failfast_jax.platforms import machine

WIDTHS = (1, 4, 8, 16, 32, 64)


def interleaved(actions: dict[Any, Callable[[], None]], repeats: int) -> dict[Any, float]:
    """Median seconds of each action, all run in turn `repeats` times after one warm-up."""
    seconds: dict[Any, list[float]] = {key: [] for key in actions}
    for turn in range(repeats + 1):
        for key, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:
                seconds[key].append(time.perf_counter() - start)
    return {key: float(np.median(values)) for key, values in seconds.items()}


def read_bandwidth(nbytes: int = 2**29) -> float:
    """Bytes a second that a compiled sum over a large array reads, the best of ten."""
    array = jax.device_put(np.ones((nbytes // 4 // 1024, 1024), np.float32))
    total = jax.jit(lambda x: x.sum(axis=1))
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(total(array))
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def weight_bytes(model: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


class _Steps:
    """One verify at a fixed width and live length, run again and again on a donated state."""

    def __init__(self, engine: FailFast, context: int, capacity: int = 1024):
        self.target = engine.target
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, self.target.config.vocab_size, (1, capacity)).astype(np.int32)
        self.context = context
        self.capacity = capacity

    def action(self, width: int) -> Callable[[], None]:
        drafter = Drafter()
        plan = round.Plan((width,), (width,), (width,))
        length = np.asarray([self.context], np.int32)

        @jax.jit
        def init(target):
            return round.init_state(
                target,
                drafter,
                tokens=self.tokens,
                prompt_length=length,
                max_new_tokens=np.asarray([self.capacity], np.int32),
                eos=np.asarray(round.pad_eos(()), np.int32),
                sampling=round.greedy_sampling(1),
                capacity=self.capacity,
                plan=plan,
            )

        drafted = self.tokens[:, self.context : self.context + width - 1]
        proposal = Draft(
            tokens=drafted,
            confidence=np.zeros(drafted.shape, np.float32),
            length=np.asarray([width - 1], np.int32),
            passes=np.zeros(1, np.int32),
        )

        def run(target, state):
            verified, state = round.verify(target, drafter, state, proposal, plan=plan)
            return verified.picks, state

        state = init(self.target)
        program = jax.jit(run, donate_argnums=1).lower(self.target, state).compile()
        holder = [state]

        def act() -> None:
            picks, holder[0] = program(self.target, holder[0])
            picks.block_until_ready()

        return act


def widths_report(engine: FailFast, repeats: int, context: int) -> dict[str, Any]:
    """Seconds of a verify by width, and the cost of each in one-row steps."""
    steps = _Steps(engine, context)
    seconds = interleaved({width: steps.action(width) for width in WIDTHS}, repeats)
    return {
        "context": context,
        "ms": {width: 1e3 * seconds[width] for width in WIDTHS},
        "one_row_steps": {width: seconds[width] / seconds[1] for width in WIDTHS},
    }


def overhead_report(engine: FailFast) -> dict[str, Any]:
    """Milliseconds that a round spends outside model passes, at most.

    The same compiled loop around a target and a drafter of one layer and 16 channels: what is left of a
    round's time is bookkeeping, and the passes of those models. Once with a vocabulary of 512, and once
    with the real one, which adds the argmax and confidence over the logits.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    out = {}
    for vocab in (512, engine.target.config.vocab_size):
        config = dataclasses.replace(
            engine.target.config, head_dim=16, tie_embeddings=True, vocab_size=vocab, eos_token_ids=(), **sizes
        )
        target = Decoder(config, rngs=nnx.Rngs(0))
        # The drafter has one row more, its mask: with a tokenizer on both sides that is no mismatch.
        tiny = FailFast(
            target, as_untrained_drafter(target), tokenizer=engine.tokenizer, drafter_tokenizer=engine.tokenizer
        )
        for method in ("vanilla", "lookup", "failfast"):
            seconds = []
            for _ in range(4):
                result = tiny.generate([list(range(100, 164))], method=method, max_new_tokens=128, ignore_eos=True)[0]
                seconds.append(result.stats.decode_s / result.stats.rounds)
            out[f"{method}_round_ms_vocab_{vocab}"] = 1e3 * float(np.median(seconds[1:]))
    return out


def speed_report(engine: FailFast, repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of `vanilla` and of transformers on the same prompts, prefill excluded from both."""
    from failfast_jax.bench import hf_reference

    ids = [engine.encode(prompt) for prompt in PROMPTS]
    config = GenerationConfig(method="vanilla", max_new_tokens=tokens, ignore_eos=True)
    ours: list[float] = []
    theirs: list[float] = []
    try:
        model = hf_reference.load_smollm2(default_target_path())
    except ModuleNotFoundError as error:
        model, missing = None, str(error)
    for turn in range(repeats + 1):
        for prompt in ids:
            speed = engine.generate([prompt], config)[0].stats.tokens_per_s
            if turn:
                ours.append(speed)
            if model is not None:
                whole = hf_reference.greedy(model, prompt, tokens, stop_at_eos=False)[2]
                first = hf_reference.greedy(model, prompt, 1, stop_at_eos=False)[2]
                if turn:
                    theirs.append((tokens - 1) / (whole - first))
    bandwidth = read_bandwidth()
    size = weight_bytes(engine.target)
    out = {
        "vanilla_tokens_per_s": float(np.median(ours)),
        "weight_bytes": size,
        "read_bandwidth_bytes_per_s": bandwidth,
        "memory_limit_tokens_per_s": bandwidth / size,
    }
    out["share_of_memory_limit"] = out["vanilla_tokens_per_s"] / out["memory_limit_tokens_per_s"]
    if model is None:
        out["transformers"] = missing
    else:
        out["transformers_tokens_per_s"] = float(np.median(theirs))
        out["vanilla_over_transformers"] = out["vanilla_tokens_per_s"] / out["transformers_tokens_per_s"]
    return out


def passes_report(engine: FailFast, tokens: int) -> dict[str, Any]:
    """Drafter passes a round of `wide` against `ceil(draft length / N)`."""
    passes, least, rounds = 0, 0, 0
    for prompt in PROMPTS:
        for tau in (0.45, 0.0):
            result = engine.generate([prompt], method="failfast", max_new_tokens=tokens, tau=tau)[0]
            passes += sum(r.passes for r in result.rounds)
            least += sum(math.ceil(len(r.drafted) / 10) for r in result.rounds)
            rounds += len(result.rounds)
    return {"rounds": rounds, "passes_per_round": passes / rounds, "least_per_round": least / rounds}


def reuse_report(engine: FailFast) -> dict[str, Any]:
    """Programs compiled (or read from the cache) by a first and by a second answer of a new engine."""
    fresh = FailFast(engine.target, engine.drafter, tokenizer=engine.tokenizer, drafter_tokenizer=engine.tokenizer)
    counts = {}
    for name, prompt in (("first", PROMPTS[1]), ("second", PROMPTS[2])):
        stats = fresh.generate([prompt], method="vanilla", max_new_tokens=16)[0].stats
        counts[name] = {"compiles": stats.compiles, "cache_hits": stats.cache_hits, "host_syncs": stats.host_syncs}
    return counts


def startup_report(runs: int) -> dict[str, Any]:
    """Seconds from process start to the first printed token, per method, compile cache warm."""
    import pty

    out = {}
    for method in ("vanilla", "lookup", "failfast"):
        seconds = []
        for _ in range(runs + 1):
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


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that were asked for; prints each as it is done, and all as JSON at the end."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench.engine", description=__doc__)
    parts = ("speed", "widths", "overhead", "passes", "reuse", "startup")
    parser.add_argument("--parts", default=",".join(parts), help=f"comma-separated, of {', '.join(parts)}")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="live cache length of the verify timings")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    unknown = set(wanted) - set(parts)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    # Any block-diffusion drafter spends the same passes; the target's own layers are at hand.
    plain = load_pair(method="vanilla")
    untrained = as_untrained_drafter(plain.target)
    engine = FailFast(plain.target, untrained, tokenizer=plain.tokenizer, drafter_tokenizer=plain.tokenizer)
    jobs = {
        "speed": lambda: speed_report(engine, max(args.repeats // 3, 1), args.tokens),
        "widths": lambda: widths_report(engine, args.repeats, args.context),
        "overhead": lambda: overhead_report(engine),
        "passes": lambda: passes_report(engine, args.tokens),
        "reuse": lambda: reuse_report(engine),
        "startup": lambda: startup_report(2),
    }
    report = {"machine": machine()}
    for part in wanted:
        report[part] = jobs[part]()
        print(f"{part}: {json.dumps(report[part], indent=1)}", file=sys.stderr, flush=True)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
