"""`auto`: the choice of each round, its limits, and that it changes no token."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int
from tiny_engines import engine, lossless
from tiny_models import committed, outcome

from failfast_jax import FailFast
from failfast_jax.decoding.decode_state import RUNNING, Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.stopping import StopRule
from failfast_jax.decoding.width_plan import make_plan
from failfast_jax.decoding.windows import gather_window
from failfast_jax.drafters import check_chances
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.policy import cost_book
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import (
    BINS,
    CREDIT,
    EDGES,
    LEAD,
    MODEL_CHANCES,
    STAKE,
    Calibration,
    Costs,
    observed,
)
from failfast_jax.runtime.model_runtime import Request

WIDTHS = (1, 4, 8, 16)
LONGEST = 15


@functools.partial(flax.struct.dataclass, kw_only=True)
class Given(Drafter):
    """Drafts that are given."""

    confidence: Float[Array, "B M"]
    length: Int[Array, " B"]
    cost: int = flax.struct.field(pytree_node=False, default=0)
    rule: StopRule | None = None

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=LONGEST)

    def init(self, batch, capacity):
        return Memory(())

    def draft(self, state, committed, prefix=None):
        length = jnp.where(committed.running, self.length, 0)
        tokens = jnp.full(self.confidence.shape, 7 + self.cost)
        return Draft(tokens, self.confidence, length, jnp.where(committed.running, self.cost, 0)), state


@flax.struct.dataclass
class Memory:
    memory: object


def view(batch: int, length: int = 20, capacity: int = 64) -> Committed:
    texts = [[*range(length)]] * batch
    return committed(texts, capacity, capacity - length - 1, prompts=[length - 5] * batch)


def economic(text: Drafter | None, model: Drafter | None, verify, draft: float = 0.0) -> Auto:
    return Auto.of(text, model).replace(widths=WIDTHS, costs=Costs.of(verify, draft))


draw = jax.jit(lambda drafter, state, committed: drafter.draft(state, committed))
UNIT = st.floats(2**-6, 0.9990234375, width=32)


@settings(max_examples=40)
@given(
    chances=st.lists(st.lists(UNIT, min_size=LONGEST, max_size=LONGEST), min_size=2, max_size=2),
    lengths=st.lists(st.integers(0, LONGEST), min_size=2, max_size=2),
    steps=st.lists(st.floats(0, 2, width=32), min_size=3, max_size=3),
    balance=st.floats(0, 20, width=32),
    ahead=st.lists(st.integers(0, 20), min_size=2, max_size=2),
    refilled=st.booleans(),
)
def test_the_choice_is_the_best_by_brute_force(chances, lengths, steps, balance, ahead, refilled):
    verify = np.cumsum([1.0, *steps])
    drafter = economic(Given(confidence=jnp.asarray(chances), length=jnp.asarray(lengths)), None, verify * 0.02)
    drafter = drafter.refilled() if refilled else drafter
    state = drafter.init(2, 64)
    state = state.replace(
        estimate=state.estimate.replace(balance=jnp.float32(balance)), ahead=jnp.asarray(ahead, jnp.float32)
    )
    draft, _ = draw(drafter, state, view(2))

    counts = np.exp(-np.asarray(ahead) / LEAD)
    counts = np.ones(2) if refilled else 2 * counts / counts.sum()
    sure = np.asarray(state.chances.text.chance(jnp.asarray(chances)))
    values = []
    for width, cost in zip(WIDTHS, verify):
        emitted = [1 + np.cumprod(sure[row][: min(lengths[row], width - 1)]).sum() for row in range(2)]
        tokens = counts @ emitted
        risk = min((cost - 1) / max(tokens / 2 - 1, 1e-6), 1)
        values.append(tokens / cost if (cost - 1) * risk <= balance - 1e-4 or width == 1 else 0)
    chosen = max(draft.length.tolist())
    needed = next(at for at, width in enumerate(WIDTHS) if width > chosen)
    assert float(counts @ draft.forecast.tokens) / float(draft.forecast.seconds[0]) * 0.02 >= 0.999 * max(values)
    assert 0.02 * verify[needed] <= float(draft.forecast.seconds[0]) * 1.001
    kept = [min(length, chosen) for length in lengths]
    assert draft.length.tolist() == kept
    emitted = [1 + np.cumprod(sure[row][: kept[row]]).sum() for row in range(2)]
    np.testing.assert_allclose(draft.forecast.tokens, emitted, rtol=1e-4)


@pytest.mark.parametrize("steps, length", [([1, 1, 1.13, 1.5, 2.3], 1), ([1, 1.6, 2.1, 3.4, 6.3], 0)])
def test_a_single_token_is_verified_if_that_pays(users_widths, steps, length):
    """Of drafts for 0.2 steps whose tokens have chances .4, .08, .08 ...: 1.4 tokens in 1.2 steps, or in 1.8."""
    model = Given(confidence=jnp.full((1, LONGEST), 0.1).at[0, 0].set(0.5), length=jnp.asarray([LONGEST]), cost=1)
    drafter = Auto.of(LOOKUP, model)
    widths = make_plan(drafter, platform="cpu", widths=users_widths).widths
    assert widths == (1, 2, 4, 8, 16)
    draft, _ = draw(drafter.planned(widths).with_costs(Costs.of(steps, 0.2)), drafter.init(1, 64), view(1))
    assert draft.length.tolist() == [length] and draft.passes.tolist() == [1]


def test_a_first_token_waits_for_no_draft():
    """Where rows are refilled; a list of prompts is done when it is done."""
    sure = Given(confidence=jnp.full((2, LONGEST), 0.99), length=jnp.full(2, LONGEST), cost=1)
    drafter = Auto.of(None, sure).planned(WIDTHS)
    usual, begins = view(2), view(2)
    begins = begins.replace(prompt_length=begins.length.at[1].add(-3))
    for kind, rows, drafts in (
        (drafter, usual, True),
        (drafter, begins, True),
        (drafter.refilled(), usual, True),
        (drafter.refilled(), begins, False),
        (drafter.refilled(), begins.replace(running=jnp.array([False, True])), True),
    ):
        draft, _ = draw(kind, kind.init(2, 64), rows)
        assert (draft.length > 0).any() == drafts == (draft.passes > 0).any()


def bins_of(*confidences: float) -> list[int]:
    return [int(np.searchsorted(EDGES, np.log(c / (1 - c)), side="right")) for c in confidences]


def test_a_calibration_learns_what_happens_and_nothing_else():
    """Of tokens after a wrong one, and after what was emitted, nothing is known."""
    chances, learned = Calibration.of(1, MODEL_CHANCES), jax.jit(Calibration.learned)
    confidence = jnp.asarray([[0.55, 0.99, 0.99, 0.3]])
    draft = Draft(jnp.asarray([[5, 6, 7, 8]]), confidence, length=jnp.asarray([4]), passes=jnp.asarray([1]))
    wrong = learned(chances, draft, jnp.asarray([[5, 9, 7, 8]]), jnp.asarray([4]))
    at = bins_of(0.55, 0.99, 0.3)
    assert wrong.tried[0, at].tolist() == [1, 1, 0] and wrong.accepted[0, at].tolist() == [1, 0, 0]
    short = learned(chances, draft, jnp.asarray([[5, 6, 7, 8]]), jnp.asarray([1]))
    assert float(short.tried.sum()) == 1 and float(short.accepted.sum()) == 1
    often = chances
    for _ in range(300):
        often = learned(often, draft, jnp.asarray([[5, 6, 9, 9]]), jnp.asarray([3]))
    assert float(often.chance(jnp.asarray([[0.55]]))[0, 0]) > 0.95
    assert abs(float(often.chance(jnp.asarray([[0.99]]))[0, 0]) - 0.5) < 0.05


def test_chances_that_were_observed_are_a_prior():
    """Tokens after the first wrong one do not count; a bin without trials keeps what suits most models."""
    drafts = [([0.55, 0.99, 0.99, 0.3], 1)] * 400 + [([0.55], 1)] * 100 + [([], 0)]
    chances, at = observed(drafts), bins_of(0.55, 0.99, 0.3)
    assert chances[at[0]] > 0.98 and chances[at[1]] < 0.03
    rest = [bin for bin in range(BINS) if bin not in at[:2]]
    np.testing.assert_allclose(np.asarray(chances)[rest], np.asarray(MODEL_CHANCES)[rest], atol=1e-4)
    assert check_chances(observed([([0.001], 0)] * 10_000), "a folder")[0] == 0  # rounded, and still a chance
    learned = Calibration.of(1, tuple(chances)).chance(jnp.asarray([[0.55, 0.3]]))
    np.testing.assert_allclose(learned[0], np.asarray(chances)[[at[0], at[2]]], rtol=1e-5)


@jax.jit
def one_round(drafter: Auto, state, before: Committed, agrees: bool):
    draft, state = drafter.draft(state, before)
    count = jnp.where(agrees, draft.length + 1, 1)
    tokens = jnp.full_like(before.tokens, jnp.where(agrees, 7, 3))
    tokens = jnp.where(agrees & (draft.passes[:, None] > 0), 8, tokens)
    after = before.replace(tokens=tokens, length=before.length + count)
    return draft, drafter.commit(state, outcome(before, after, draft))


def run(drafter: Auto, agrees: bool, rounds: int, purse: float = CREDIT) -> tuple[list[int], list[float], list[int]]:
    """Lengths and costs of rounds whose drafts are all right, or all wrong, and the model's passes."""
    state, at = drafter.init(1, 4096), 20
    state = state.replace(estimate=state.estimate.replace(balance=jnp.float32(purse)))
    lengths, seconds, passes = [], [], []
    for _ in range(rounds):
        draft, state = one_round(drafter, state, view(1, at, 4096), agrees)
        lengths.append(int(draft.length[0]))
        seconds.append(float(draft.forecast.seconds[0]))
        passes.append(int(draft.passes[0]))
        at += lengths[-1] + 1 if agrees else 1
    return lengths, seconds, passes


def sources(confidence: float = 0.9) -> tuple[Given, Given]:
    sure = jnp.full((1, LONGEST), confidence)
    length = jnp.asarray([LONGEST])
    return Given(confidence=sure, length=length), Given(confidence=sure, length=length, cost=1)


@pytest.mark.parametrize("table", [[1, 1.7, 1.9, 2.6], [1, 3, 4, 5]])
def test_what_always_fails_costs_at_most_the_purse(table):
    """Plain decoding of as many rounds takes as many steps."""
    _, seconds, _ = run(economic(*sources(), table, 0.3), False, 200)
    assert sum(seconds) <= 200 + CREDIT + 0.01 * 200 * 1.1 + max(table)
    assert sum(seconds[100:]) <= 104  # it learns


def test_an_empty_purse_fills_while_drafts_are_seen_to_be_right():
    """What was lost at the beginning does not keep a text that repeats itself from being drafted."""
    drafter = economic(sources()[0], None, [1, 1.7, 1.9, 2.6])
    lengths, *_ = run(drafter, True, 40, purse=-1.0)
    assert lengths[:8] == [0] * 8 and lengths[-25:] == [LONGEST] * 25
    assert run(drafter, False, 40, purse=-1.0)[0] == [0] * 40


def test_a_model_is_asked_where_it_is_cheap_and_right():
    _, model = sources()
    assert sum(run(economic(None, model, [1, 1.02, 1.05, 1.1], 0.05), True, 20)[2]) >= 18
    # Where it is always wrong, hardly ever: neither on a cheap nor on a costly machine.
    assert sum(run(economic(None, model, [1, 1.02, 1.05, 1.1], 0.05), False, 100)[2]) < 60
    assert sum(run(economic(None, model, [1, 2, 3, 4], 1.0), False, 100)[2]) <= 2


@functools.partial(flax.struct.dataclass, kw_only=True)
class Continuing(Given):
    """Continues a draft."""

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=LONGEST, max_prefix=LONGEST - 1)

    def draft(self, state, committed, prefix):
        draft, state = super().draft(state, committed)
        begins = jnp.arange(LONGEST) < prefix.length[:, None]
        tokens, confidence = (jnp.pad(part, ((0, 0), (0, 1))) for part in (prefix.tokens, prefix.confidence))
        tokens = jnp.where(begins, tokens, draft.tokens)
        return draft.replace(tokens=tokens, confidence=jnp.where(begins, confidence, draft.confidence)), state


@settings(max_examples=40)
@given(
    confidence=st.lists(UNIT, min_size=2, max_size=2),
    lengths=st.lists(st.integers(0, LONGEST), min_size=2, max_size=2),
    hoped=st.floats(1, LONGEST, width=32),
)
def test_a_model_continues_text_that_is_surer_than_its_own_first_tokens(confidence, lengths, hoped):
    """By brute force over both beginnings of each row."""
    sure = jnp.broadcast_to(jnp.asarray(confidence)[:, None], (2, LONGEST))
    text = Given(confidence=sure, length=jnp.asarray(lengths))
    model = Continuing(confidence=jnp.full((2, LONGEST), 0.9), length=jnp.full(2, LONGEST), cost=1)
    drafter = economic(text, model, [1, 1, 1, 1])
    state = drafter.init(2, 64)
    state = state.replace(estimate=state.estimate.replace(tokens=jnp.float32(hoped), cost=jnp.float32(1e-3)))
    _, after = draw(drafter, state, view(2))
    for row, length in enumerate(lengths):
        chance = float(state.chances.text.chance(sure)[row, 0])
        continued = 1 + sum(chance**n for n in range(1, length + 1)) + chance**length * (hoped - 1)
        begun = int(after.chances.begun[row])
        assert begun in (0, length)
        if abs(continued - hoped) > 1e-4:
            assert bool(begun) == (0 < length < LONGEST and continued > hoped)
        assert after.model_draft.tokens[row].tolist() == [7] * begun + [8] * (LONGEST - begun)


def test_the_model_learns_only_of_its_own_tokens():
    text = Given(confidence=jnp.full((1, LONGEST), 0.9), length=jnp.asarray([3]))
    model = Continuing(confidence=jnp.full((1, LONGEST), 0.6), length=jnp.full(1, LONGEST), cost=1)
    drafter = economic(text, model, [1, 1, 1, 1])
    state = drafter.init(1, 64)
    state = state.replace(estimate=state.estimate.replace(tokens=jnp.float32(1.1), cost=jnp.float32(1e-3)))
    draft, state = draw(drafter, state, view(1))
    assert state.chances.begun.tolist() == [3]
    before = view(1)
    right = jnp.where(jnp.arange(64) < 23, 7, 8)[None]  # by the text's tokens, and two of the model's
    for emitted, of_model in ((6, 3), (2, 0)):
        after = before.replace(tokens=right.at[0, 25].set(9), length=before.length + emitted)
        learned = drafter.commit(state, outcome(before, after, draft)).chances
        assert float(learned.model.tried.sum()) == of_model
        assert float(learned.text.tried.sum()) == min(emitted, 3)


def test_a_draft_of_both_changes_no_token():
    """A text that ends on a repetition, where the lookup's draft ends and the model goes on."""
    model = engine()
    drafter = model.build_drafter(GenerationConfig("auto"))
    session = model.runtime.session(drafter, batch=3, capacity=256)  # with the programs of the next test
    session = session.with_costs(Costs.of(np.ones(len(session.plan.widths)), 0.0))
    state, begun = session.prefill([Request(prompt, 60) for prompt in PROMPTS]), False
    while RUNNING in (progress := session.read(state)).finish:
        state = session.advance(state, 1)
        begun |= bool(state.drafter.chances.begun.any())
    expected = model.generate(PROMPTS, method="vanilla", max_new_tokens=60, ignore_eos=True)
    assert progress.ids == [result.output_ids for result in expected]
    assert begun


def purse_after(drafter: Auto, emitted: list[list[int]], running: list[list[bool]]) -> float:
    """What the purse has gained by rounds of plain cost that emit so many tokens; `running`: after each."""
    rows, stake = len(emitted[0]), 0.0
    state, before = drafter.init(rows, 64).replace(cost=jnp.float32(1)), view(rows)
    for counts, run in zip(emitted, running):
        after = before.replace(length=before.length + jnp.asarray(counts), running=jnp.asarray(run))
        stake += STAKE / int(before.running.sum())
        state = drafter.commit(state, outcome(before, after))
        before = after
    return float(state.estimate.balance) - CREDIT / rows - stake


def test_a_list_of_prompts_waits_for_its_slowest_row():
    drafter = economic(Given(confidence=jnp.full((3, LONGEST), 0.5), length=jnp.zeros(3, int)), None, [1, 2, 3, 4])
    on = [True] * 3
    assert purse_after(drafter, [[4, 4, 1]], [on]) == pytest.approx(0, abs=1e-5)
    assert purse_after(drafter.refilled(), [[4, 4, 1]], [on]) == pytest.approx(2, abs=1e-5)
    assert purse_after(drafter, [[4, 3, 1], [1, 1, 4]], [on, on]) == pytest.approx(2, abs=1e-5)
    # Who has finished is waited for no more; what the last one has won stays.
    ended = [True, True, False]
    assert purse_after(drafter, [[4, 3, 1], [1, 1, 1]], [on, ended]) == pytest.approx(2, abs=1e-5)
    assert purse_after(drafter, [[4, 3, 1], [1, 2, 1]], [ended, [False] * 3]) == pytest.approx(3, abs=1e-5)


PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], list(range(3, 23)), [9]]


@pytest.mark.parametrize("draft", [0.05, 5.0])
def test_no_token_changes(draft, monkeypatch):
    model, options = engine(), {"method": "auto", "max_new_tokens": 40, "ignore_eos": True}
    monkeypatch.setattr(cost_book, "measure", lambda session: table_for(session, draft))
    model.runtime.costs = cost_book.CostBook()
    results = lossless(model, PROMPTS, **options)
    assert all(result.stats.costs["draft"] == pytest.approx(draft) for result in results)
    rounds = [entry for result in results for entry in result.rounds]
    assert all(entry.expected >= 1 and entry.seconds > 0 for entry in rounds)
    assert any(entry.drafted for entry in rounds)
    again = model.generate(PROMPTS, **options)
    assert [result.rounds for result in again] == [result.rounds for result in results]
    model.runtime.costs = cost_book.CostBook()


def table_for(session, draft: float) -> Costs:
    rows = np.asarray(session.plan.widths, np.float32)
    return Costs.of(1 + (rows - rows[0]) / 30, draft)


def test_options_of_a_drafter_that_is_not_there():
    alone = FailFast(engine().target)
    assert alone.build_drafter(GenerationConfig("auto", max_spec_len=7, lookup_min=3)).max_draft == 7
    with pytest.raises(OptionError, match="--lookup-min 0: needs --drafter"):
        alone.build_drafter(GenerationConfig("auto", lookup_min=0))
    with pytest.raises(OptionError, match="--spec-len 4: needs a drafter"):
        alone.build_drafter(GenerationConfig("auto", spec_len=4))


def test_the_default_method_chooses_by_costs_and_a_named_one_does_not():
    def kind(*method, **options):
        return type(engine().build_drafter(GenerationConfig(*method, **options)))

    assert kind() is kind("auto", max_spec_len=20) is Auto
    assert Auto not in (kind("failfast"), kind("lookup"), kind("suffix"))
    drafter = engine().build_drafter(GenerationConfig("auto", lookup_min=0))
    assert drafter.text is None and drafter.model is not None


# The policy over known answers on simulated machines, beside the best of fixed ways to draft.

TEXT = [5 + at % 5 for at in range(256)]
BEGIN = 10
LOOKUP = Lookup(min_match=1, shortest=LONGEST, max_spec_len=LONGEST)
LOOKED_UP = jax.jit(LOOKUP.draft)


@functools.partial(flax.struct.dataclass, kw_only=True)
class NextToken(Given):
    """Knows the next token, and is wrong about those after it."""

    def draft(self, state, committed, prefix):
        draft, state = super().draft(state, committed)
        following = gather_window(committed.tokens, committed.length, LONGEST)
        return draft.replace(tokens=jnp.where(jnp.arange(LONGEST) == 0, following, 1)), state


SOURCE = {"confidence": np.full((1, LONGEST), 0.2, np.float32), "length": np.int32([3]), "cost": 1}
SOURCE["confidence"][0, :2] = 0.9, 0.8


def part(length: Int[Array, ""], end: int) -> Committed:
    """An answer that ends there, as far as it is written."""
    room, running = jnp.maximum(end - length - 1, 0)[None], (length < end)[None]
    return committed([TEXT[:BEGIN]], len(TEXT), 0).replace(length=length[None], room=room, running=running)


@functools.partial(jax.jit, static_argnames=("end", "prior"))
def by_policy(costs: Costs, end: int, prior: tuple[float, ...] = MODEL_CHANCES) -> tuple[jax.Array, jax.Array]:
    """Steps and rounds of an answer."""
    drafter = Auto(text=LOOKUP, model=NextToken(**SOURCE), costs=costs, widths=WIDTHS, prior=prior).with_costs(costs)

    def body(carry):
        length, state, steps, rounds = carry
        before = part(length, end)
        draft, drafted = drafter.draft(state, before)
        following = gather_window(before.tokens, before.length, LONGEST)
        agreed = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, end - length), following)
        now = length + jnp.minimum(agreed[0] + 1, end - length)
        return now, drafter.commit(drafted, outcome(before, part(now, end), draft)), steps + drafted.cost, rounds + 1

    start = (jnp.int32(BEGIN), drafter.init(1, len(TEXT)), jnp.float32(0), jnp.int32(0))
    return jax.lax.while_loop(lambda carry: carry[0] < end, body, start)[2:]


def by_rule(verify: list[float], longest: int, end: int) -> float:
    """Steps of a lookup that drafts so many tokens after any match."""
    at, steps = BEGIN, 0.0
    while at < end:
        draft, _ = LOOKED_UP((), part(jnp.int32(at), len(TEXT)))
        drafted = min(longest, int(draft.length[0]))
        right = int(np.cumprod(np.asarray(draft.tokens[0, :drafted]) == TEXT[at : at + drafted]).sum())
        steps += verify[next(rung for rung, width in enumerate(WIDTHS) if width > drafted)]
        at += min(right, end - at - 1) + 1
    return steps


def test_the_policy_drafts_what_pays():
    assert [float(n) for n in by_policy(Costs.of([1, 50, 60, 70], 40.0), 46)] == [36, 36]
    flat = Costs.of([1, 1, 1, 1], 0.1)
    assert by_policy(flat, 46, prior=(1e-6,) * BINS)[0] >= by_policy(flat, 46)[0]
    steps, rounds = by_policy(Costs.of(np.ones(4), 0.0), 46)
    assert float(steps) == int(rounds) < 8


@pytest.mark.parametrize("verify_8", [1.0, 4.0])
def test_the_policy_beside_the_best_fixed_setting(verify_8):
    """On a text that repeats itself; verifies grow like the rows to the power of 0.6, as on the CPUs measured."""
    verify = [1 + (verify_8 - 1) * ((width - 1) / 7) ** 0.6 for width in WIDTHS]
    steps, _ = by_policy(Costs.of(verify, 0.3), 240)
    best = min(by_rule(verify, longest, 240) for longest in (3, 7, 15))
    assert best / float(steps) > 0.9 and float(steps) < 230  # those of plain decoding
