"""Model drafters over many rounds: their caches never change what they draft.

Rounds are played by hand: a hypothesis example says how much of each draft is accepted and which token follows.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiers
from tiny_engines import standalone_engine
from tiny_models import VOCAB, committed, diffusion_config, outcome, random_model, tiny_config

from failfast_jax import GenerationConfig
from failfast_jax.decoding import BelowThreshold, Drafter
from failfast_jax.decoding.decode_state import Committed
from failfast_jax.decoding.unmasking import to_fill
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.block_diffusion import Refine, Wide
from failfast_jax.options import Site

BATCH, WIDTH, CAPACITY = 2, 256, 150
PREFILL = 64
MASK = VOCAB - 1


@functools.cache
def drafter(kind: str) -> Drafter:
    def block_options(block: int, spec_len: int, max_spec_len: int, tau: float, **changes) -> dict:
        model = random_model(diffusion_config(block, **changes), seed=block)
        lengths = {"spec_len": spec_len, "max_spec_len": max_spec_len}
        return {"model": model, "vocab": VOCAB - 1, "rule": BelowThreshold(np.float32(tau)), **lengths}

    return {
        "wide": lambda: Wide(**block_options(8, 3, 9, 0.25)),
        "wide, chunks longer than blocks": lambda: Wide(**block_options(4, 10, 30, 0.1)),
        "wide, no shift": lambda: Wide(**block_options(8, 3, 9, 0.25, token_shift=False)),
        "aligned": lambda: Aligned(**block_options(8, 3, 9, 0.2), threshold=np.float32(0.4), small_block=4),
        "fast-dllm": lambda: Aligned(
            **block_options(8, 6, 6, 0.0), threshold=np.float32(0.9), small_block=4, expand=False
        ),
        "ar": lambda: Autoregressive(model=autoregressive(), vocab=VOCAB, spec_len=5),
        "ar, dynamic": lambda: Autoregressive(
            model=autoregressive(), vocab=VOCAB, spec_len=2, max_spec_len=8, rule=BelowThreshold(np.float32(0.25))
        ),
        "ar, seldom": lambda: Autoregressive.of(Site(model=autoregressive(), vocab=VOCAB), seldom=True, spec_len=4),
        "specdiff": lambda: Refine(
            model=random_model(diffusion_config(4), seed=4), vocab=VOCAB - 1, spec_len=7, steps=3
        ),
    }[kind]()


@functools.cache
def autoregressive():
    return random_model(tiny_config(num_layers=1), seed=3)


WIDE = ("wide", "wide, no shift", "wide, chunks longer than blocks")
DIFFUSION = (*WIDE, "aligned", "fast-dllm", "specdiff")
AUTOREGRESSIVE = ("ar", "ar, dynamic")
STOPS = jnp.broadcast_to(jnp.arange(3, 11), (BATCH, 8))

draft_of = jax.jit(lambda drafter, state, committed: drafter.draft(state, committed))
commit = jax.jit(lambda drafter, state, *round_: drafter.commit(state, outcome(*round_)))
empty = jax.jit(lambda drafter: drafter.init(BATCH, WIDTH))


@jax.jit
def prefill(drafter, committed):
    state = drafter.init(BATCH, WIDTH)
    for start in range(0, CAPACITY, PREFILL):
        state = drafter.prefill(state, committed, jnp.int32(start), PREFILL, jnp.zeros((BATCH, PREFILL, 0, 16)))
    return state


def seen(texts: list[list[int]], prompts: list[int] | None = None) -> Committed:
    room = [max(CAPACITY - len(text) - 1, 0) for text in texts]
    return committed(texts, WIDTH, np.asarray(room), prompts=prompts)


def assert_same_draft(one, other) -> None:
    np.testing.assert_array_equal(one.length, other.length)
    for row, length in enumerate(np.asarray(one.length)):
        assert one.tokens[row, :length].tolist() == other.tokens[row, :length].tolist()
        np.testing.assert_allclose(one.confidence[row, :length], other.confidence[row, :length], atol=1e-4)


def confidences_of(logits: np.ndarray) -> np.ndarray:
    return 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def grown_by_hand(drafter: Wide | Autoregressive, text: list[int], room: int) -> tuple[list[int], list[float], int]:
    """The schedule as the design writes it, by full recomputation without a cache; every chunk may be the last.

    Returns tokens, confidences, and passes.
    """
    wide = isinstance(drafter, Wide)
    tau = drafter.rule.tau if isinstance(drafter.rule, BelowThreshold) else 0
    drafted, confidences, passes = [], [], 0
    while True:
        front, step = len(text) + len(drafted), drafter.spec_len if wide else 1
        end = math.ceil((front + step) / drafter.block) * drafter.block if wide else front
        ids = np.full((1, end), MASK)
        ids[0, :front] = [*text, *drafted]
        logits = np.array(drafter.model.logits(ids)[0, front - int(drafter.model.config.token_shift) :][:step])
        if wide:
            logits[:, MASK] = -np.inf
        drafted += logits.argmax(-1).tolist()
        confidences += confidences_of(logits).tolist()
        passes += 1
        stopped = not wide and drafted[-1] in STOPS[0]
        if len(drafted) % drafter.spec_len and not stopped:
            continue
        low = min(confidences[-drafter.spec_len :]) < tau
        if stopped or low or len(drafted) + drafter.spec_len > drafter.max_draft or len(drafted) >= room:
            return drafted[:room], confidences[:room], passes


def specdiff_by_hand(drafter: Refine, text: list[int], room: int) -> tuple[list[int], list[float], int]:
    """One step after the other, each over the whole text."""
    block, length, steps = drafter.block, drafter.spec_len, drafter.steps
    ids = np.full((1, math.ceil((len(text) + length) / block) * block), MASK)
    ids[0, : len(text)] = text
    confidences, free = np.zeros(length), list(range(length))
    for step in range(1, steps + 1):
        logits = np.array(drafter.model.logits(ids)[0, len(text) - 1 : len(text) - 1 + length])
        logits[:, MASK] = -np.inf
        certain = confidences_of(logits)
        filled = length - len(free)
        for at in sorted(free, key=lambda at: (-certain[at], at))[: math.ceil(step * length / steps) - filled]:
            ids[0, len(text) + at], confidences[at] = logits[at].argmax(), certain[at]
            free.remove(at)
    return ids[0, len(text) : len(text) + min(length, room)].tolist(), confidences[:room].tolist(), steps


texts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=70)
turns = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, VOCAB - 2)) | st.just((1.0, 5)), min_size=BATCH, max_size=BATCH
)


@pytest.mark.parametrize(
    "kind",
    tiers(
        [*DIFFUSION, *AUTOREGRESSIVE],
        quick=["wide, no shift", "aligned", "ar"],
        long=["wide", "fast-dllm", "ar, dynamic"],
    ),
)
@settings(max_examples=6)
@given(
    prompts=st.lists(texts | st.just([7, 3] * 70), min_size=BATCH, max_size=BATCH),
    rounds=st.lists(turns, min_size=1, max_size=6),
)
def test_drafts_do_not_depend_on_the_cache(kind, prompts, rounds):
    """Round by round: the same draft as of a drafter that prefills the whole text anew."""
    method, sequence = drafter(kind), [list(prompt) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    state = prefill(method, seen(sequence))
    for turn in rounds:
        before = seen(sequence, lengths).replace(eos=STOPS)
        draft, state = draft_of(method, state, before)
        fresh, _ = draft_of(method, prefill(method, before), before)
        assert_same_draft(draft, fresh)
        for row, (share, token) in enumerate(turn):
            length, room = int(draft.length[row]), int(before.room[row])
            if room and kind not in ("aligned", "fast-dllm"):
                by_hand = specdiff_by_hand if kind == "specdiff" else grown_by_hand
                tokens, confidence, passes = by_hand(method, sequence[row], room)
                assert draft.tokens[row, :length].tolist() == tokens
                np.testing.assert_allclose(draft.confidence[row, :length], confidence, atol=2e-4)
                assert draft.passes[row] == passes  # blocks are stored on the way
            kept = draft.tokens[row, : math.floor(share * length)].tolist() if length else []
            # The text may go on with tokens of another source, as in rounds of `auto`.
            sequence[row] = [*sequence[row], *kept, *[token] * (1 + length % 3)][: CAPACITY - 1]
        state = commit(method, state, before, seen(sequence, lengths), draft)


def test_every_step_sees_the_row_of_the_first_token():
    """After a text that ends with a block, that row lies in the block before the draft, which the first step stores."""
    method, rng = drafter("specdiff"), np.random.default_rng(1)
    late = 0
    for length in range(method.block, 9 * method.block, method.block):
        now = seen([rng.integers(0, MASK, length).tolist() for _ in range(BATCH)])
        draft, _ = draft_of(method, prefill(method, now), now)
        for row in range(BATCH):
            tokens, confidence, _ = specdiff_by_hand(method, now.tokens[row, :length].tolist(), int(now.room[row]))
            assert draft.tokens[row].tolist() == tokens
            late += confidence[0] < min(sorted(confidence)[-2:])
    assert late > 3  # the first token was not among those that the first step filled


@pytest.mark.parametrize("kind", ["wide", "aligned", "ar, seldom"])
@settings(max_examples=6)
@given(prompts=st.lists(texts, min_size=BATCH, max_size=BATCH), known=st.integers(0, 20))
def test_a_drafter_that_missed_rounds_catches_up(kind, prompts, known):
    """Nothing, or little, of a long text is cached: the draft is the one of a drafter that has seen all."""
    method = drafter(kind)
    now = seen([prompt + [4] * 20 for prompt in prompts])
    state = empty(method)
    if known:
        state = prefill(method, seen([prompt[:known] for prompt in prompts]))
    draft, after = draft_of(method, state, now)
    expected, cached = draft_of(method, prefill(method, now), now)
    assert_same_draft(draft, expected)
    np.testing.assert_array_equal(after.cached, cached.cached)
    more = np.asarray(draft.passes) - np.asarray(expected.passes)
    assert (more >= 0).all() and (kind != "ar, seldom" or (more <= 1).all())  # 64 tokens are read at once
    again, _ = draft_of(method, commit(method, after, now, now), now)
    assert_same_draft(again, expected)


@pytest.mark.parametrize("kind", [*DIFFUSION, *AUTOREGRESSIVE])
def test_a_draft_never_exceeds_what_it_announces(kind):
    """Nor the room, which one text has none of; the mask token is never drafted, and no hole where it is committed."""
    method, rng = drafter(kind), np.random.default_rng(0)
    pairs = [[rng.integers(0, MASK, rng.integers(1, 140)).tolist() for _ in range(BATCH)] for _ in range(10)]
    for texts in (*pairs, [[3] * (CAPACITY - 1), [3] * 20], [[3, MASK, 4] * 5, [MASK] * 9]):
        now = seen(texts)
        draft, _ = draft_of(method, prefill(method, now), now)
        assert draft.tokens.shape == (BATCH, method.max_draft)
        for tokens, length, passes, room in zip(draft.tokens, np.asarray(draft.length), draft.passes, now.room):
            assert length in (room, *method.shape.lengths) and length <= room
            assert (length > 0) == (passes > 0) == (room > 0)
            assert kind in AUTOREGRESSIVE or MASK not in tokens[:length].tolist()


def test_ties_are_filled_from_the_left():
    confidence = np.asarray([[0.5, 0.9, 0.5, 0.9, 0.5]])
    masked = np.asarray([[True, True, True, False, True]])
    for count, expected in ((0, []), (1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2, 4])):
        assert np.flatnonzero(to_fill(confidence, masked, least=count)[0]).tolist() == expected


def test_options_build_drafters():
    def build(method: str, **options) -> Drafter:
        return standalone_engine().build_drafter(GenerationConfig(method, **options))

    one_step, two_steps = build("specdiff", spec_len=6), build("specdiff", steps=2)
    assert isinstance(one_step, Wide) and one_step.shape.lengths == (6,) and not one_step.sampled
    assert build("specdiff", spec_len=6, acceptance="rejection").sampled
    # What records tell of a growing draft: rounds above spec_len were extended.
    assert one_step.describe() == {"kind": "other", "spec_len": 6, "grows": False}
    assert build("failfast", spec_len=6).describe() == {"kind": "other", "spec_len": 6, "grows": True}
    assert not build("failfast", spec_len=8, max_spec_len=12).describe()["grows"]  # one chunk fits
    assert isinstance(two_steps, Refine) and (two_steps.max_draft, two_steps.steps) == (10, 2)
    rule = build("failfast", rule="congestion").rule
    assert (rule.first, rule.least, rule.most, rule.increase) == (10, 8, 30, np.float32(1.8))
    reusing = build("failfast", reuse=True, spec_len=4, max_spec_len=10)
    assert reusing.shape.lengths == tuple(range(4, 11)) and reusing.model.max_draft == 8
    released = build("failfast", schedule="aligned", reuse=True)
    assert released.released and released.max_draft == 2 * released.model.max_draft
