"""The policy over known answers on simulated machines, beside the best of many fixed ways to draft."""

from __future__ import annotations

import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.stopping import StopRule
from failfast_jax.decoding.windows import gather_window
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import BINS, MODEL_CHANCES, Chances, Costs

WIDTHS, LONGEST, SIZE = (1, 4, 8, 16), 15, 256
LOOKUP = Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST)


@flax.struct.dataclass
class Memory:
    memory: Chances


@functools.partial(flax.struct.dataclass, kw_only=True)
class Remembered(Drafter):
    """Drafts three tokens that were recorded at each place of an answer."""

    tokens: Int[Array, "places M"]
    confidence: Float[Array, "places M"]
    begin: Int[Array, ""]
    rule: StopRule | None = None

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=self.tokens.shape[1])

    def init(self, batch, capacity):
        return Memory(self.rule.init(batch))

    def draft(self, state, committed, begun):
        at = committed.length - self.begin
        length = jnp.where(committed.running, jnp.minimum(self.tokens.shape[1], committed.room), 0)
        return Draft(self.tokens[at], self.confidence[at], length, committed.running.astype(jnp.int32)), state


def view(text: Int[Array, " T"], begin: int, length: Int[Array, ""], end: int) -> Committed:
    room = jnp.maximum(end - length - 1, 0)[None]
    same = {"prompt_length": jnp.asarray([begin]), "eos": jnp.full((1, 8), -1)}
    return Committed(tokens=text[None], length=length[None], room=room, running=(length < end)[None], **same)


@functools.partial(jax.jit, static_argnames=("begin", "end", "prior"))
def by_policy(text, model: Remembered, costs: Costs, *, begin: int, end: int, prior: tuple[float, ...] = MODEL_CHANCES):
    """Steps and rounds of an answer that begins and ends at these places of the text."""
    drafter = Auto(text=LOOKUP, model=model, costs=costs, widths=WIDTHS, prior=prior).with_costs(costs)

    def one_round(carry):
        length, state, steps, rounds = carry
        before = view(text, begin, length, end)
        draft, drafted = drafter.draft(state, before)
        following = gather_window(text[None], length[None], draft.tokens.shape[1])
        agreed = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, end - length), following)
        now = length + jnp.minimum(agreed[0] + 1, end - length)
        outcome = Outcome(before, view(text, begin, now, end), draft, agreed, jnp.zeros((1, 1, 0, 1)))
        return now, drafter.commit(drafted, outcome), steps + drafted.cost, rounds + 1

    start = (jnp.int32(begin), drafter.init(1, SIZE), jnp.float32(0), jnp.int32(0))
    return jax.lax.while_loop(lambda carry: carry[0] < end, one_round, start)[2:]


def by_rule(text: list[int], verify: list[float], match: int, longest: int, *, begin: int, end: int) -> float:
    """Steps of a lookup of fixed length from matches of at least `match` tokens."""
    find, at, steps = jax.jit(LOOKUP.find), begin, 0.0
    while at < end:
        draft, matched = find(view(jnp.asarray(text), begin, jnp.int32(at), SIZE))
        drafted = longest if int(matched[0]) >= match else 0
        right = int(np.cumprod(np.asarray(draft.tokens[0, :drafted]) == text[at : at + drafted]).sum())
        steps += verify[next(rung for rung, width in enumerate(WIDTHS) if width > drafted)]
        at += min(right, end - at - 1) + 1
    return steps


PERIOD = [5, 6, 7, 8, 9]
TEXT = (PERIOD * SIZE)[:SIZE]
ANSWER = {"begin": 10, "end": 46}


@pytest.fixture
def model() -> Remembered:
    """It is right about the next token only, of a text that repeats itself."""
    tokens = np.stack([TEXT, np.ones(SIZE), np.ones(SIZE)], 1).astype(np.int32)[10:]
    return Remembered(tokens=tokens, confidence=np.float32([[0.9, 0.8, 0.2]] * len(tokens)), begin=np.int32(10))


def test_the_policy_drafts_what_pays(model):
    text = jnp.asarray(TEXT)
    assert [float(n) for n in by_policy(text, model, Costs.of([1, 50, 60, 70], 40.0), **ANSWER)] == [36, 36]
    flat = Costs.of([1, 1, 1, 1], 0.1)
    assert by_policy(text, model, flat, **ANSWER, prior=(1e-6,) * BINS)[0] >= by_policy(text, model, flat, **ANSWER)[0]
    steps, rounds = by_policy(text, model, Costs.flat(4), **ANSWER)
    assert float(steps) == int(rounds) < 8


@pytest.mark.parametrize("verify_8", [1.0, 2.0, 4.0])
def test_the_policy_beside_the_best_fixed_setting(verify_8, model):
    """On a text that repeats itself; verifies grow like the rows to the power of 0.6, as on the CPUs measured."""
    verify, answer = [1 + (verify_8 - 1) * ((width - 1) / 7) ** 0.6 for width in WIDTHS], {"begin": 10, "end": 240}
    fixed = [by_rule(TEXT, verify, *one, **answer) for one in itertools.product((1, 99), (3, 7, 15))]
    steps, _ = by_policy(jnp.asarray(TEXT), model, Costs.of(verify, 0.3), **answer)
    assert min(fixed) / float(steps) > 0.9 and float(steps) < 230
