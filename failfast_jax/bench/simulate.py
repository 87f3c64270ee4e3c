"""`--policy auto` against every fixed setting, on machines that there are not.

1. Each question is answered once, with the drafter asked at every place of the answer and one row verified. As outputs
   are the target's own, that says what any drafting would have done.
2. The policy itself, compiled as in decoding, and all fixed settings go over these answers on made-up machines: what a
   verify of 8 rows and a pass of the drafter cost, in plain steps.

Prints, for each machine, the best fixed setting, the policy's speed beside it, and its slowest question; at last how
well chances of acceptance were known. What was answered is kept in `--out`, from which a killed run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax import distributed
from failfast_jax.bench.datasets import load_dataset
from failfast_jax.bench.report import shown
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding.accept import agreeing_prefix
from failfast_jax.decoding.drafter import Drafter, Wrapper
from failfast_jax.decoding.economics import BINS, MODEL_CHANCES, Costs
from failfast_jax.decoding.state import Committed, Draft, Outcome
from failfast_jax.decoding.stopping import StopRule
from failfast_jax.decoding.windows import gather_window
from failfast_jax.defaults import load_pair
from failfast_jax.drafters.economic import Economic
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.engine import FailFast
from failfast_jax.files import Journal, sole_writer, user_path, write_json
from failfast_jax.progress import progress_bar
from failfast_jax.runtime import Request
from failfast_jax.tables import markdown

WIDTHS, LONGEST = (1, 4, 8, 16), 15
VERIFY_8, PASS = (1.0, 1.5, 2.0, 3.0, 4.0), (0.05, 0.3, 1.0)
"""Steps that a verify of 8 rows takes, and a pass of the drafter."""
LEARNED = 100
"""Rounds after which chances should be known."""
MATCHES, LENGTHS, CUTS = (1, 2, 3, 4, 6, 99), (3, 7, 15), (0.0, 0.3, 0.6)
"""Of fixed settings: shortest matches (99: no lookups), draft lengths, and confidences that end a draft."""


def steps_of(verify_8: float) -> list[float]:
    """A verify of each width, in steps: growing like the rows to the power of 0.6, as on the CPUs measured."""
    return [1 + (verify_8 - 1) * ((width - 1) / 7) ** 0.6 for width in WIDTHS]


# -- answers ---------------------------------------------------------------------------------------------------


@functools.partial(flax.struct.dataclass, kw_only=True)
class Unverified(Wrapper):
    """The drafts of `model` at every place of an answer: in the log, with length 0."""

    model: Drafter

    @property
    def max_draft(self) -> int:
        return self.model.max_draft

    def init(self, batch, capacity):
        return self.model.init(batch, capacity)

    def prefill(self, state, committed, start, width, features):
        return self.model.prefill(state, committed, start, width, features)

    def draft(self, state, committed, begun=None):
        draft, state = self.model.draft(state, committed, begun)
        # Where nothing was drafted the confidence says so.
        inside = jnp.arange(self.max_draft) < draft.length[:, None]
        return draft.replace(
            length=jnp.zeros_like(draft.length), confidence=jnp.where(inside, draft.confidence, 0.0)
        ), state

    def commit(self, state, outcome):
        return self.model.commit(state, outcome)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, and what the drafter says at each of its places."""

    prompt: list[int]
    output: list[int]
    drafted: list[list[int]]
    confidence: list[list[float]]


def answers(engine: FailFast, prompts: Sequence[list[int]], tokens: int, journal: Journal) -> list[Answer]:
    """All answers, those that the journal lacks given now."""
    drafter = engine.build_drafter(GenerationConfig("failfast", policy="fixed", lookup_min=0, min_gain=0.0))
    unverified, runtime = Unverified(model=drafter), engine.runtime
    for prompt in progress_bar("answers", "answer", prompts[len(journal.records) :]):
        capacity = runtime.capacity(len(prompt), tokens, drafter.max_draft)
        session = runtime.session(unverified, capacity=capacity)
        state = session.advance(session.prefill([Request(prompt, tokens, eos=engine.eos_token_ids)]))
        log = jax.device_get(state.log)
        rounds = int(log.rounds[0])
        output = session.read(state).ids[0]
        journal.append(
            {
                "kind": "answer",
                "prompt": list(prompt),
                "output": output,
                "drafted": log.drafted[0, :rounds].tolist(),
                "confidence": np.round(log.confidence[0, :rounds], 5).tolist(),
            }
        )
    kept = [{k: v for k, v in record.items() if k != "kind"} for record in journal.records]
    return [Answer(**record) for record in kept if record["output"]]


# -- the policy ------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class _Memory:
    memory: Any


@functools.partial(flax.struct.dataclass, kw_only=True)
class Remembered(Drafter):
    """A drafter whose drafts at each place of an answer are known."""

    tokens: Int[Array, "places M"]
    confidence: Float[Array, "places M"]
    begin: Int[Array, ""]
    rule: StopRule | None = None

    @property
    def max_draft(self) -> int:
        return self.tokens.shape[1]

    def init(self, batch, capacity):
        return _Memory(self.rule.init(batch))

    def draft(self, state, committed, begun=None):
        at = committed.length - self.begin
        drafted = jnp.cumprod(self.confidence[at] > 0, axis=1).sum(1)
        length = jnp.where(committed.running, jnp.minimum(drafted, committed.room), 0)
        return Draft(self.tokens[at], self.confidence[at], length, committed.running.astype(jnp.int32)), state


@flax.struct.dataclass
class Told:
    """What a simulated answer came to."""

    steps: Float[Array, ""]
    rounds: Int[Array, ""]
    known: Float[Array, "2 2 10 3"]
    """Of all rounds, and of those after `LEARNED`, by source and tenth of the chance: tokens tried, the sum of their
    chances, and how many were accepted."""


@functools.partial(jax.jit, static_argnames="prior")
def by_policy(
    text: Int[Array, " T"],
    begin: Int[Array, ""],
    count: Int[Array, ""],
    model: Remembered,
    costs: Costs,
    *,
    prior: tuple[float, ...] = MODEL_CHANCES,
) -> Told:
    """An answer of `count` tokens behind `begin` of prompt, drafted as the policy says; `prior`: of the model's
    chances."""
    lookup = Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST)
    drafter = Economic(text=lookup, model=model, costs=costs, widths=WIDTHS, prior=prior).with_costs(costs)
    end = begin + count

    def at(length: Int[Array, ""]) -> Committed:
        left = jnp.maximum(end - length - 1, 0)[None]
        same = {"prompt_length": begin[None], "eos": jnp.full((1, 8), -1)}
        return Committed(tokens=text[None], length=length[None], room=left, running=(length < end)[None], **same)

    def one_round(carry):
        length, state, told = carry
        before = at(length)
        draft, drafted = drafter.draft(state, before)
        following = gather_window(text[None], length[None], draft.tokens.shape[1])
        agreed = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, end - length), following)
        emitted = jnp.minimum(agreed[0] + 1, end - length)
        known = _known(state, drafted, following, emitted)
        told = told.replace(
            steps=told.steps + drafted.cost,
            rounds=told.rounds + 1,
            known=told.known + jnp.stack([known, jnp.where(told.rounds >= LEARNED, known, 0)]),
        )
        outcome = Outcome(before, at(length + emitted), draft, jnp.minimum(agreed, emitted), jnp.zeros((1, 1, 0, 1)))
        return length + emitted, drafter.commit(drafted, outcome), told

    told = Told(jnp.float32(0), jnp.int32(0), jnp.zeros((2, 2, 10, 3)))
    start = (begin, drafter.init(1, text.shape[0]), told)
    return jax.lax.while_loop(lambda carry: carry[0] < end, one_round, start)[2]


def _known(state: Any, drafted: Any, following: Int[Array, "1 M"], emitted: Int[Array, ""]) -> Float[Array, "2 10 3"]:
    """What a round adds to `Told.known`: what each source drafted, as far as the text tells whether it is right."""
    found = []
    for chances, draft in (
        (state.chances.text, drafted.text_draft),
        (state.chances.model, drafted.model_draft),
    ):
        length = jnp.minimum(draft.length, emitted)
        agreed = agreeing_prefix(draft.tokens, length, following)
        chance, columns = chances.chance(draft.confidence)[0], jnp.arange(draft.tokens.shape[1])
        tried = (columns < jnp.minimum(agreed + 1, length)).astype(jnp.float32)
        tenth = jax.nn.one_hot(jnp.clip((chance * 10).astype(jnp.int32), 0, 9), 10)
        found.append(tenth.T @ jnp.stack([tried, tried * chance, tried * (columns < agreed)], -1))
    return jnp.stack(found)


# -- fixed settings ----------------------------------------------------------------------------------------------


def places(answer: Answer) -> list[tuple[int, int, int, list[float]]]:
    """At each place: tokens that match, how many of the lookup's and of the model's drafts are right, confidences."""
    text, found = np.asarray([*answer.prompt, *answer.output, *[-1] * LONGEST]), []
    lookup = jax.jit(Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST).find)
    size = 64 * -(-len(text) // 64)
    padded = jnp.asarray(np.pad(text, (0, size - len(text)), constant_values=-1))[None]
    for at in range(len(answer.output)):
        length = jnp.asarray([len(answer.prompt) + at])
        one = jnp.ones((1,), jnp.int32)
        draft, match = lookup(Committed(padded, length, one, one * size, one > 0, jnp.full((1, 8), -1)))
        following = text[len(answer.prompt) + at :]
        told = at < len(answer.drafted)
        own = _right(answer.drafted[at], following) if told else 0
        found.append((int(match[0]), _right(draft.tokens[0], following), own, answer.confidence[at] if told else []))
    return found


def _right(tokens: Any, following: np.ndarray) -> int:
    tokens = np.asarray(tokens)[: len(following)]
    return int(np.cumprod(tokens == following[: len(tokens)]).sum())


def fixed_steps(
    found: Sequence[tuple[int, int, int, list[float]]], verify: Sequence[float], drafter_pass: float, setting: tuple
) -> float:
    """Steps of an answer under a setting `(shortest match, lookup's length, model's length, cut)`."""
    shortest, length, own, cut = setting
    at, steps = 0, 0.0
    while at < len(found):
        match, right, mine, confidence = found[at]
        if match >= shortest:
            drafted, agreed = length, min(right, length)
        elif own:
            drafted = sum(1 for _ in itertools.takewhile(lambda c: c > 0 and c >= cut, confidence[:own]))
            agreed, steps = min(mine, drafted), steps + drafter_pass
        else:
            drafted = agreed = 0
        steps += verify[next(rung for rung, width in enumerate(WIDTHS) if width > drafted)]
        at += agreed + 1
    return steps


def settings_of(longest: int) -> list[tuple]:
    """All fixed settings, for a drafter of drafts up to `longest` tokens."""
    alone = [(match, length, 0, 0.0) for match in MATCHES for length in LENGTHS]
    own = sorted({min(3, longest), longest})
    return alone + [(*rest[:2], length, cut) for rest in alone for length in own for cut in CUTS]


def named(setting: tuple) -> str:
    """A fixed setting in words."""
    shortest, length, own, cut = setting
    text = "no lookup" if shortest == MATCHES[-1] else f"{length} tokens from matches of {shortest}"
    return f"{text}, {f'model {own} above {cut:g}' if own else 'no model'}"


# -- the command ---------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", metavar="P", help="default: the embedded pair")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dataset", metavar="D", default="humaneval", help="a dataset of `bench run`, or a file")
    parser.add_argument("--limit", metavar="n", type=int, default=20, help="questions")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=128)
    parser.add_argument("--out", metavar="DIR", type=user_path, default=Path("failfast-simulate"))
    distributed.refuse_flag(parser, "it needs one device: start it on one host")


def inputs(answer: Answer, size: int) -> tuple[Any, ...]:
    """Arguments of `by_policy`, costs apart, padded so that one program serves all answers."""
    text = np.zeros(size, np.int32)
    text[: len(answer.prompt) + len(answer.output)] = [*answer.prompt, *answer.output]
    rows = len(answer.drafted)
    width = min(len(answer.drafted[0]), LONGEST)
    spare = ((0, size - rows), (0, 0))
    begin = np.int32(len(answer.prompt))
    tokens = np.pad(np.asarray(answer.drafted, np.int32)[:, :width], spare, constant_values=-1)
    confidence = np.pad(np.asarray(answer.confidence, np.float32)[:, :width], spare)
    return text, begin, np.int32(len(answer.output)), Remembered(tokens=tokens, confidence=confidence, begin=begin)


def simulated(given: Sequence[Answer], prior: tuple[float, ...] = MODEL_CHANCES) -> dict[str, Any]:
    """Speeds on all machines, and how well chances were known on them; `prior`: of the drafter's chances."""
    size = 128 * -(-max(len(a.prompt) + len(a.output) + LONGEST for a in given) // 128)
    arrays = [inputs(answer, size) for answer in given]
    found = [places(answer) for answer in progress_bar("places", "answer", given)]
    lengths = np.asarray([len(answer.output) for answer in given])
    settings = settings_of(min(len(given[0].drafted[0]), LONGEST))
    rows, known = [], np.zeros((2, 2, 10, 3))
    for verify_8, drafter_pass in itertools.product(VERIFY_8, PASS):
        verify = steps_of(verify_8)
        fixed = {s: np.asarray([fixed_steps(at, verify, drafter_pass, s) for at in found]) for s in settings}
        best = min(fixed, key=lambda setting, steps=fixed: steps[setting].sum())
        costs = Costs(np.asarray(verify, np.float32), np.float32(drafter_pass), np.int32(0), np.int32(0))
        told = [by_policy(*one, costs, prior=prior) for one in arrays]
        steps = np.asarray([float(one.steps) for one in told])
        known += sum(np.asarray(one.known, np.float64) for one in told)
        rows.append(
            {
                "verify_8": verify_8,
                "drafter_pass": drafter_pass,
                "best_fixed": named(best),
                "best_fixed_speedup": float(lengths.sum() / fixed[best].sum()),
                "auto_speedup": float(lengths.sum() / steps.sum()),
                "auto_over_best": float(fixed[best].sum() / steps.sum()),
                "auto_slowest_question": float((lengths / steps).min()),
            }
        )
    tried, off = known[..., 0].sum(-1), np.abs(known[..., 1] - known[..., 2]).sum(-1)
    calibration = {
        when: {
            source: {"error": float(error / count) if count else None, "tokens": int(count)}
            for source, error, count in zip(("text", "model"), *both)
        }
        for when, *both in zip(("all rounds", f"rounds after {LEARNED}"), off, tried)
    }
    return {"machines": rows, "calibration_error": calibration}


def work(args: argparse.Namespace) -> None:
    """Answers, simulates and prints."""
    GenerationConfig(max_new_tokens=args.max_new_tokens).validate()
    dataset = load_dataset(args.dataset, limit=args.limit)
    engine = load_pair(args.target, args.drafter, method="failfast")
    prompts = [engine.encode(question.prompt) for question in dataset.questions if question.follows is None]
    identity = {"dataset": args.dataset, "target": engine.target_name, "drafter": engine.drafter_name}
    with sole_writer(args.out):
        journal = Journal(args.out / "answers.jsonl", {**identity, "max_new_tokens": args.max_new_tokens, "bins": BINS})
        found = simulated(answers(engine, prompts, args.max_new_tokens, journal), engine.chances)
        write_json(args.out / "summary.json", found)
    head = ("verify of 8", "drafter pass", "best fixed setting", "its speed", "auto", "auto / best", "slowest question")
    cells = [
        [f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in found["machines"]
    ]
    print(markdown(head, cells))
    print()
    for when, sources in found["calibration_error"].items():
        said = (f"{name} {shown(one['error'], 3)} ({one['tokens']} tokens)" for name, one in sources.items())
        print(f"expected calibration error, {when}, all machines: {', '.join(said)}")
