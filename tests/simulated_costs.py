"""`--method auto` against every fixed setting on simulated machines, which differ in their costs.

    python tests/simulated_costs.py --dataset humaneval --limit 20

1. Each question is answered once, with the drafter asked at every place of the answer and one row verified. Outputs are
   the target's own, so the answers say what any way of drafting would have led to.
2. The policy itself, compiled as in decoding, and all fixed settings go over these answers on each machine.

Prints, for each machine, the best fixed setting, the policy's speed beside it and its slowest question; then how well
the chances of acceptance were known. The figures stand in docs/measured.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.decoding.decode_state import Committed, Draft, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.stopping import StopRule
from failfast_jax.decoding.windows import gather_window
from failfast_jax.defaults import load_pair
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import MODEL_CHANCES, Costs
from failfast_jax.public_data.question_sets import load_dataset
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.tables import markdown

WIDTHS, LONGEST = (1, 4, 8, 16), 15
VERIFY_8, PASS = (1.0, 1.5, 2.0, 3.0, 4.0), (0.05, 0.3, 1.0)
"""Costs of a verify of 8 rows and of a drafter pass, in plain steps."""
LEARNED = 100
"""Rounds after which chances should be known."""
NO_LOOKUP = 99
MATCHES, LENGTHS, CUTS = (1, 2, 3, 4, 6, NO_LOOKUP), (3, 7, 15), (0.0, 0.3, 0.6)
"""Of fixed settings: shortest matches, draft lengths, and confidences below which a draft ends."""


def verify_costs(verify_8: float) -> list[float]:
    """Steps of a verify of each width: they grow like the rows to the power of 0.6, as on the CPUs measured."""
    return [1 + (verify_8 - 1) * ((width - 1) / 7) ** 0.6 for width in WIDTHS]


# -- answers with drafts at every place --------------------------------------------------------------------------


@functools.partial(flax.struct.dataclass, kw_only=True)
class Unverified(Drafter):
    """Logs the drafts of `model` at every place of an answer, and verifies none of them."""

    model: Drafter

    @property
    def shape(self) -> DraftShape:
        return self.model.shape

    def init(self, batch, capacity):
        return self.model.init(batch, capacity)

    def prefill(self, state, committed, start, width, features):
        return self.model.prefill(state, committed, start, width, features)

    def draft(self, state, committed):
        draft, state = self.model.draft(state, committed)
        # Confidence 0 marks places that were not drafted.
        inside = jnp.arange(self.max_draft) < draft.length[:, None]
        confidence = jnp.where(inside, draft.confidence, 0.0)
        return draft.replace(length=jnp.zeros_like(draft.length), confidence=confidence), state

    def commit(self, state, outcome):
        return self.model.commit(state, outcome)


@dataclasses.dataclass(frozen=True)
class DraftedAnswer:
    """An answer, with the drafter's tokens and confidences at each of its places."""

    prompt: list[int]
    output: list[int]
    drafted: list[list[int]]
    confidence: list[list[float]]


def answer(engine: FailFast, drafter: Drafter, prompt: list[int], tokens: int) -> DraftedAnswer:
    """Answers a prompt with `drafter` asked at every place."""
    unverified, runtime = Unverified(model=drafter), engine.runtime
    session = runtime.session(unverified, capacity=runtime.capacity(len(prompt), tokens, drafter.max_draft))
    state = session.advance(session.prefill([Request(prompt, tokens, eos=engine.eos_token_ids)]))
    log, output = jax.device_get(state.log), session.read(state).ids[0]
    rounds = int(log.rounds[0])
    return DraftedAnswer(prompt, output, log.drafted[0, :rounds].tolist(), log.confidence[0, :rounds].tolist())


# -- the policy ------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class _Memory:
    memory: Any


@functools.partial(flax.struct.dataclass, kw_only=True)
class Remembered(Drafter):
    """Drafts what was recorded at each place of an answer."""

    tokens: Int[Array, "places M"]
    confidence: Float[Array, "places M"]
    begin: Int[Array, ""]
    rule: StopRule | None = None

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=self.tokens.shape[1])

    def init(self, batch, capacity):
        return _Memory(self.rule.init(batch))

    def draft(self, state, committed):
        at = committed.length - self.begin
        drafted = jnp.cumprod(self.confidence[at] > 0, axis=1).sum(1)
        length = jnp.where(committed.running, jnp.minimum(drafted, committed.room), 0)
        return Draft(self.tokens[at], self.confidence[at], length, committed.running.astype(jnp.int32)), state


@flax.struct.dataclass
class Simulated:
    """Totals of a simulated answer.

    `known`: for all rounds and for those after `LEARNED`, by source (text, model) and tenth of the chance, the tokens
    tried, the sum of their chances, and the tokens accepted.
    """

    steps: Float[Array, ""]
    rounds: Int[Array, ""]
    known: Float[Array, "2 2 10 3"]


@functools.partial(jax.jit, static_argnames="prior")
def by_policy(
    text: Int[Array, " T"],
    begin: Int[Array, ""],
    count: Int[Array, ""],
    model: Remembered,
    costs: Costs,
    *,
    prior: tuple[float, ...] = MODEL_CHANCES,
) -> Simulated:
    """Simulates the policy over an answer of `count` tokens after a prompt of `begin`; `prior`: the model's chances."""
    lookup = Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST)
    drafter = Auto(text=lookup, model=model, costs=costs, widths=WIDTHS, prior=prior).with_costs(costs)
    end = begin + count

    def at(length: Int[Array, ""]) -> Committed:
        left = jnp.maximum(end - length - 1, 0)[None]
        same = {"prompt_length": begin[None], "eos": jnp.full((1, 8), -1)}
        return Committed(tokens=text[None], length=length[None], room=left, running=(length < end)[None], **same)

    def one_round(carry):
        length, state, totals = carry
        before = at(length)
        draft, drafted = drafter.draft(state, before)
        following = gather_window(text[None], length[None], draft.tokens.shape[1])
        agreed = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, end - length), following)
        emitted = jnp.minimum(agreed[0] + 1, end - length)
        known = _known(state, drafted, following, emitted)
        totals = totals.replace(
            steps=totals.steps + drafted.cost,
            rounds=totals.rounds + 1,
            known=totals.known + jnp.stack([known, jnp.where(totals.rounds >= LEARNED, known, 0)]),
        )
        outcome = Outcome(before, at(length + emitted), draft, jnp.minimum(agreed, emitted), jnp.zeros((1, 1, 0, 1)))
        return length + emitted, drafter.commit(drafted, outcome), totals

    totals = Simulated(jnp.float32(0), jnp.int32(0), jnp.zeros((2, 2, 10, 3)))
    start = (begin, drafter.init(1, text.shape[0]), totals)
    return jax.lax.while_loop(lambda carry: carry[0] < end, one_round, start)[2]


def _known(state: Any, drafted: Any, following: Int[Array, "1 M"], emitted: Int[Array, ""]) -> Float[Array, "2 10 3"]:
    """A round's part of `Simulated.known`: drafts of both sources as far as the text tells whether they are right."""
    sources = []
    for chances, draft in ((state.chances.text, drafted.text_draft), (state.chances.model, drafted.model_draft)):
        length = jnp.minimum(draft.length, emitted)
        agreed = agreeing_prefix(draft.tokens, length, following)
        chance, columns = chances.chance(draft.confidence)[0], jnp.arange(draft.tokens.shape[1])
        tried = (columns < jnp.minimum(agreed + 1, length)).astype(jnp.float32)
        tenth = jax.nn.one_hot(jnp.clip((chance * 10).astype(jnp.int32), 0, 9), 10)
        sources.append(tenth.T @ jnp.stack([tried, tried * chance, tried * (columns < agreed)], -1))
    return jnp.stack(sources)


def inputs(answer: DraftedAnswer, size: int) -> tuple[Any, ...]:
    """Arguments of `by_policy` other than costs, padded so that one program serves all answers."""
    text = np.zeros(size, np.int32)
    text[: len(answer.prompt) + len(answer.output)] = [*answer.prompt, *answer.output]
    width = min(len(answer.drafted[0]), LONGEST)
    spare = ((0, size - len(answer.drafted)), (0, 0))
    begin = np.int32(len(answer.prompt))
    tokens = np.pad(np.asarray(answer.drafted, np.int32)[:, :width], spare, constant_values=-1)
    confidence = np.pad(np.asarray(answer.confidence, np.float32)[:, :width], spare)
    return text, begin, np.int32(len(answer.output)), Remembered(tokens=tokens, confidence=confidence, begin=begin)


# -- fixed settings ----------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A place of an answer: length of the match, right tokens of the lookup and of the model, its confidences."""

    match: int
    text_right: int
    model_right: int
    confidence: list[float]


class Setting(NamedTuple):
    """A fixed way to draft; `model_length` 0: without the model."""

    shortest_match: int
    text_length: int
    model_length: int
    cut: float

    def __str__(self) -> str:
        text = f"{self.text_length} tokens from matches of {self.shortest_match}"
        text = "no lookup" if self.shortest_match == NO_LOOKUP else text
        return f"{text}, {f'model {self.model_length} above {self.cut:g}' if self.model_length else 'no model'}"


def places(answer: DraftedAnswer) -> list[Place]:
    """Compares both drafts at each place of an answer with what follows there."""
    text, result = np.asarray([*answer.prompt, *answer.output, *[-1] * LONGEST]), []
    lookup = jax.jit(Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST).find)
    size = 64 * -(-len(text) // 64)
    padded = jnp.asarray(np.pad(text, (0, size - len(text)), constant_values=-1))[None]
    for at in range(len(answer.output)):
        length, ones = jnp.asarray([len(answer.prompt) + at]), jnp.ones((1,), jnp.int32)
        draft, match = lookup(Committed(padded, length, ones, ones * size, ones > 0, jnp.full((1, 8), -1)))
        following = text[len(answer.prompt) + at :]
        tokens, confidence = (answer.drafted[at], answer.confidence[at]) if at < len(answer.drafted) else ([], [])
        right = _right(draft.tokens[0], following), _right(tokens, following)
        result.append(Place(int(match[0]), *right, confidence))
    return result


def _right(tokens: Any, following: np.ndarray) -> int:
    tokens = np.asarray(tokens)[: len(following)]
    return int(np.cumprod(tokens == following[: len(tokens)]).sum())


def fixed_steps(answer: Sequence[Place], verify: Sequence[float], drafter_pass: float, setting: Setting) -> float:
    """Steps of an answer under a setting."""
    at, steps = 0, 0.0
    while at < len(answer):
        place = answer[at]
        if place.match >= setting.shortest_match:
            drafted, agreed = setting.text_length, min(place.text_right, setting.text_length)
        elif setting.model_length:
            sure = itertools.takewhile(lambda c: c > 0 and c >= setting.cut, place.confidence[: setting.model_length])
            drafted = len([*sure])
            agreed, steps = min(place.model_right, drafted), steps + drafter_pass
        else:
            drafted = agreed = 0
        steps += verify[next(rung for rung, width in enumerate(WIDTHS) if width > drafted)]
        at += agreed + 1
    return steps


def all_settings(longest: int) -> list[Setting]:
    """All fixed settings for a drafter of drafts up to `longest` tokens."""
    text = [*itertools.product(MATCHES, LENGTHS)]
    model = [*itertools.product(sorted({min(3, longest), longest}), CUTS)]
    return [Setting(*one, *other) for one in text for other in [(0, 0.0), *model]]


# -- the simulation ------------------------------------------------------------------------------------------------


def simulate(answers: Sequence[DraftedAnswer], prior: tuple[float, ...] = MODEL_CHANCES) -> dict[str, Any]:
    """Speeds on all machines, and the calibration error of chances; `prior`: the drafter's chances at first."""
    size = 128 * -(-max(len(a.prompt) + len(a.output) + LONGEST for a in answers) // 128)
    arrays = [inputs(answer, size) for answer in answers]
    by_place = [places(answer) for answer in progress_bar("places", "answer", answers)]
    lengths = np.asarray([len(answer.output) for answer in answers])
    settings = all_settings(min(len(answers[0].drafted[0]), LONGEST))
    machines, known = [], np.zeros((2, 2, 10, 3))
    for verify_8, drafter_pass in itertools.product(VERIFY_8, PASS):
        verify = verify_costs(verify_8)
        fixed = {s: np.asarray([fixed_steps(answer, verify, drafter_pass, s) for answer in by_place]) for s in settings}
        best = min(fixed, key=lambda setting, steps=fixed: steps[setting].sum())
        costs = Costs(np.asarray(verify, np.float32), np.float32(drafter_pass), np.int32(0), np.int32(0))
        totals = [by_policy(*arguments, costs, prior=prior) for arguments in arrays]
        steps = np.asarray([float(total.steps) for total in totals])
        known += sum(np.asarray(total.known, np.float64) for total in totals)
        machines.append(
            {
                "verify of 8": verify_8,
                "drafter pass": drafter_pass,
                "best fixed setting": str(best),
                "its speed": float(lengths.sum() / fixed[best].sum()),
                "auto": float(lengths.sum() / steps.sum()),
                "auto / best": float(fixed[best].sum() / steps.sum()),
                "slowest question": float((lengths / steps).min()),
            }
        )
    tried, off = known[..., 0].sum(-1), np.abs(known[..., 1] - known[..., 2]).sum(-1)
    return {"machines": machines, "calibration_error": off / np.maximum(tried, 1), "tokens": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="humaneval", help="a dataset of `bench run`, or a file of prompts")
    parser.add_argument("--limit", type=int, default=20, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    questions = load_dataset(args.dataset, limit=args.limit).questions
    engine = load_pair(method="failfast")
    drafter = engine.build_drafter(GenerationConfig("failfast", spec_len=engine.drafter.rows))
    prompts = [engine.encode(question.prompt) for question in questions if question.follows is None]
    answers = [
        answer(engine, drafter, prompt, args.max_new_tokens) for prompt in progress_bar("answers", "answer", prompts)
    ]
    result = simulate([answer for answer in answers if answer.output], engine.chances)
    head = list(result["machines"][0])
    print(
        markdown(head, [[v if isinstance(v, str) else f"{v:.2f}" for v in row.values()] for row in result["machines"]])
    )
    for when, errors, tokens in zip(
        ("all rounds", f"rounds after {LEARNED}"), result["calibration_error"], result["tokens"]
    ):
        sources = (
            f"{name} {error:.3f} ({count:.0f} tokens)" for name, error, count in zip(("text", "model"), errors, tokens)
        )
        print(f"expected calibration error, {when}, all machines: {', '.join(sources)}")


if __name__ == "__main__":
    sys.exit(main())
