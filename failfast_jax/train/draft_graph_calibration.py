"""`python -m failfast_jax.train spiffy`: calibrate the draft graph of `generate --method dllm --spiffy`.

A block-diffusion model answers some dozens of prompts by plain decoding. The guesses of each pass are compared with
the tokens that the next ones fill in: the states that text really goes through, named by ranks, are counted. Those that
most texts reach by way of kept states are kept. The graph is a small JSON file beside the model, or at `--out`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.checkpoints.draft_graph import DraftGraph, Pairs, default_file
from failfast_jax.checkpoints.hub import find_models
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.drafters import DIFFUSION_METHOD
from failfast_jax.drafters.dllm import MOST_STATES, ScheduleOptions
from failfast_jax.engine import FailFast
from failfast_jax.errors import ConfigError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, add_flags, add_flags_of, option, require
from failfast_jax.train import documents
from failfast_jax.train.conversations import read_conversations
from failfast_jax.util.files import user_path

BATCH = 8
"""Prompts that are answered together."""
Ids = Sequence[int]


@dataclasses.dataclass(frozen=True)
class CalibrationOptions(CommandOptions):
    """Options of the command that are numbers."""

    prompts: int = option(48, "first n to count on, or all of fewer", least=1)
    states: int = option(16, "maximum number of draft states to keep", least=1, most=MOST_STATES)
    max_new_tokens: int = option(128, "tokens per answer", least=1)
    temperature: float = option(0.0, "of the answers", least=0)
    seed: int = option(0, "random seed", least=0)
    tensor_parallel: int = option(1, "devices that share each layer", least=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--target", metavar="P", required=True, help="the block-diffusion model")
    data = "prompts: .npz files, folders of them, or .jsonl of chats"
    parser.add_argument("--data", type=user_path, nargs="+", required=True, help=data)
    parser.add_argument("--out", metavar="FILE", type=user_path, help="default: spiffy.json beside the model")
    add_flags_of(parser, CalibrationOptions)
    parser.add_argument("--dtype", choices=DTYPES, help="weight dtype (default: as stored)")
    add_flags(parser.add_argument_group("schedule", "as of generate"), {DIFFUSION_METHOD: ScheduleOptions})


def work(args: argparse.Namespace) -> None:
    """Counts on prompts, chooses states and writes the graph."""
    options = CalibrationOptions.given(args)
    schedule = {name: getattr(args, name) for name in ScheduleOptions.names()}
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    config = GenerationConfig(DIFFUSION_METHOD, options=schedule, **sampling)
    find_models({"--target": args.target})
    file = args.out or default_file(args.target)
    require(file.resolve().parent.is_dir(), f"--out {file}", "no such folder")
    engine = FailFast(args.target, dtype=args.dtype, tensor_parallel=options.tensor_parallel)
    vocab = engine.target.config.vocab_size
    read = {".jsonl": lambda file: read_conversations(file, load_tokenizer(args.target), vocab)}
    loaded = documents.load_documents(args.data, vocab, 3, engine.max_seq_len, skip_short=True, read=read)
    counted = [prompt.tolist() for prompt, _ in loaded.pairs()[: options.prompts]]
    graph = calibrated(engine, counted, config, options.states)
    graph.save(file)
    print(json.dumps({"file": str(file), "states": len(graph.pair_sets), **graph.about}))


def calibrated(engine: FailFast, prompts: Sequence[Ids], config: GenerationConfig, most: int) -> DraftGraph:
    """Returns the draft graph of a model, of `most` states, from plain decoding.

    Raises:
      ConfigError: no pass filled what the one before had among its best tokens.
    """
    plain = engine.resolve(config, options={**config.options, "spiffy": 0})
    trajectories, sizes = [], None
    for first in range(0, len(prompts), BATCH):
        rows, sizes = passes_of(engine, prompts[first : first + BATCH], plain)
        for row in rows:
            trajectories += trajectories_of(row, engine.target.config.mask_token_id)
    chosen = best_states(trajectories, most)
    if not chosen:
        raise ConfigError(
            f"{engine.target_name}: no pass of {len(prompts)} answers filled what the one before had among its best; "
            "give more --prompts or a larger --max-new-tokens, or leave --spiffy out with this model"
        )
    block, small, threshold = sizes
    about = {
        "threshold": threshold,
        "temperature": plain.temperature,
        "prompts": len(prompts),
        "passes": len(trajectories),
        "counts": [count for _, count in chosen],
    }
    return DraftGraph(block, small, tuple(pairs for pairs, _ in chosen), about)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A sequence before a pass over its block.

    Attributes:
      at: start of the block.
      block: its tokens `[D]`.
      guess_at: start of the small block that the pass before was about; -1: none.
      tokens: best tokens of its positions `[d, K]`, best first.
      confidence: probability of each position's best one `[d]`.
    """

    at: int
    block: np.ndarray
    guess_at: int
    tokens: np.ndarray
    confidence: np.ndarray


def passes_of(
    engine: FailFast, prompts: Sequence[Ids], config: GenerationConfig
) -> tuple[list[list[Pass]], tuple[int, int, float]]:
    """Returns each sequence's passes by plain decoding; block size, small block size and threshold."""
    session = engine.session(prompts, config)
    state = session.prefill([engine.request(prompt, config, row) for row, prompt in enumerate(prompts)])
    rows: list[list[Pass]] = [[] for _ in prompts]
    while True:
        guesses = state.guesses
        parts = (state.running, state.text, state.at, guesses.at, guesses.tokens, guesses.confidence)
        running, *seen = jax.device_get(parts)
        if not running.any():
            return rows, (session.block, session.small_block, float(session.threshold))
        for row in np.flatnonzero(running):
            text, at, guess_at, *best = (part[row] for part in seen)
            rows[row].append(Pass(int(at), text[at : at + session.block], int(guess_at), *best))
        state = session.advance(state, 1)


def trajectories_of(passes: Sequence[Pass], mask_token: int) -> Iterator[list[Pairs]]:
    """Yields for each pass the states that the following ones began with, by the ranks of its guesses.

    A trajectory ends with its small block, or where a token was filled that was not among the best ones.
    """
    for index, now in enumerate(passes):
        places = now.guess_at - now.at + np.arange(len(now.confidence))
        if now.guess_at < now.at or not (masked := now.block[places] == mask_token).any():
            continue
        order = np.flatnonzero(masked)[np.argsort(-now.confidence[masked], kind="stable")]
        states: list[Pairs] = []
        for later in passes[index + 1 :]:
            if later.at != now.at or (states and len(states[-1]) == len(order)):
                break
            filled = later.block[places]
            pairs = [(rank, place) for rank, place in enumerate(order) if filled[place] != mask_token]
            ranks = [np.flatnonzero(now.tokens[place] == filled[place]) for _, place in pairs]
            if not all(map(len, ranks)):
                break
            states.append(tuple((rank, int(best[0])) for (rank, _), best in zip(pairs, ranks)))
        yield states


def best_states(trajectories: Sequence[Sequence[Pairs]], most: int) -> list[tuple[Pairs, int]]:
    """Returns up to `most` states, each with the number of trajectories that reach it by way of states before it.

    A state is only worth its count where all states on the way to it are kept, too: one after another, the one that
    most trajectories have next is taken. So every beginning of the list is a graph of its own.
    """
    left = [collections.deque(states) for states in trajectories]
    chosen: dict[Pairs, int] = {}
    while len(chosen) < most:
        following = collections.Counter(states[0] for states in left if states)
        if not following:
            break
        best, count = min(following.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        chosen[best] = count
        for states in left:
            while states and states[0] in chosen:
                states.popleft()
    return list(chosen.items())
