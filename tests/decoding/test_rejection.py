"""Both acceptance rules against exact enumeration, and rules that are wrong on purpose."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import chi_square, filtered_probability
from tiers import tiers
from tiny_models import diffusion_config, prefilled, random_dspark, random_eagle, random_model, sampling, tiny_config

from failfast_jax import decoding
from failfast_jax.decoding import picking
from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.drafters.eagle3 import EagleChain
from failfast_jax.drafters.feature_block import FeatureBlockDrafter

SAMPLES = 200_000
VOCAB, DRAFT, TOKENS = 5, 2, 3
"""Two tokens are drafted a round; the first three that are emitted are looked at."""
SETTINGS = (0.8, 4, 0.93)
"""Temperature, top-k, top-p: both models lose tokens to the filters, and not the same ones."""

rng = np.random.default_rng(0)
# A target that looks at the last token; of the drafters, the one-pass one sees the last committed token alone.
TARGET = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.3
ONE_PASS = rng.normal(size=(DRAFT, VOCAB, VOCAB)).astype(np.float32)
LEFT_TO_RIGHT = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)


def one_pass_logits(last):
    return jnp.moveaxis(jnp.asarray(ONE_PASS)[:, last], 0, 1)


def one_pass_drafts(last, positions, options):
    return picking.sample_draft(one_pass_logits(last), positions, options)


def left_to_right_drafts(last, positions, options):
    tokens, qs = [last], []
    for index in range(DRAFT):
        logits = jnp.asarray(LEFT_TO_RIGHT)[tokens[-1]][:, None]
        token, q = picking.sample_draft(logits, positions[:, index, None], options)
        tokens.append(token[:, 0])
        qs.append(q[:, 0])
    return jnp.stack(tokens[1:], 1), jnp.stack(qs, 1)


def argmax_drafts(last, positions, options):
    """For the rule that compares with the target's own picks; there is no `q`."""
    return jnp.argmax(one_pass_logits(last), -1), jnp.zeros((*positions.shape, VOCAB))


def drafts_with_unfiltered_q(last, positions, options):
    """Wrong: the tokens come from the filtered distribution, `q` is the unfiltered one."""
    unfiltered = jax.nn.softmax(one_pass_logits(last) / SETTINGS[0], -1)
    return one_pass_drafts(last, positions, options)[0], unfiltered


def drafts_in_confidence_order(last, positions, options):
    """Wrong: of two samples the more confident one stays, and the other is drawn again with that one in view."""
    first, q = one_pass_drafts(last, positions, options)
    probability = jnp.take_along_axis(q, first[..., None], -1)[..., 0]
    kept = jnp.argmax(probability, 1)[:, None]
    other = 1 - kept
    seen = jnp.take_along_axis(first, kept, 1)
    logits = jnp.asarray(LEFT_TO_RIGHT)[seen] + jnp.asarray(ONE_PASS)[other, last[:, None]]
    again, new_q = picking.sample_draft(logits, jnp.take_along_axis(positions, other, 1) + 50, options)
    refilled = jnp.arange(DRAFT) == other
    return jnp.where(refilled, again, first), jnp.where(refilled[..., None], new_q, q)


def drafts_with_the_noise_of_resampling(last, positions, options):
    """Wrong: one stream of randomness for drafting and for what replaces a rejected token."""
    filtered = picking.filtered_logits(one_pass_logits(last), options)
    noise = picking.gumbel_noise(options, positions, VOCAB, picking.RESAMPLING)
    return picking.argmax(filtered + noise), jax.nn.softmax(filtered, -1)


RIGHT = (argmax_drafts, one_pass_drafts, left_to_right_drafts)
WRONG = (drafts_with_unfiltered_q, drafts_in_confidence_order, drafts_with_the_noise_of_resampling)
PART = 20_000


@jax.jit
def part_of_texts(which, first):
    """The first tokens of `PART` sequences, each decoded in rounds with randomness of its own."""

    def text_of(sequence):
        options = sampling(1, *SETTINGS, seed=7, sequence=sequence)

        def body(_, carry):
            text, length = carry
            last, positions = text[:, length - 1], (length + jnp.arange(DRAFT + 1))[None]
            branches = [functools.partial(make, last, positions[:, :DRAFT], options) for make in RIGHT + WRONG]
            draft, q = jax.lax.switch(which, branches)
            logits = jnp.asarray(TARGET)[jnp.concatenate([last[:, None], draft], 1)]
            draft_and_bonus, q = jnp.pad(draft, ((0, 0), (0, 1))), jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
            drafted = jnp.arange(DRAFT + 1)[None] < DRAFT
            picks = jax.lax.cond(
                which == RIGHT.index(argmax_drafts),
                lambda: picking.pick(logits, positions, options),
                lambda: picking.pick_or_reject(logits, positions, options, draft_and_bonus, q, drafted),
            )
            accepted = picking.agreeing_prefix(draft, jnp.asarray([DRAFT]), picks)[0]
            columns = jnp.where(jnp.arange(DRAFT + 1) <= accepted, positions[0], text.shape[1])
            return text.at[:, columns].set(picks, mode="drop"), jnp.minimum(length + accepted + 1, 1 + TOKENS)

        text = jnp.zeros((1, 1 + TOKENS + DRAFT), jnp.int32)
        text, _ = jax.lax.fori_loop(0, TOKENS, body, (text, jnp.int32(1)))
        return text[0, 1 : 1 + TOKENS]

    return jax.vmap(text_of)(first + jnp.arange(PART))


def texts(drafts, samples: int) -> np.ndarray:
    which = (RIGHT + WRONG).index(drafts)
    return np.concatenate([part_of_texts(which, first) for first in range(0, samples, PART)])


def target_distribution() -> np.ndarray:
    """Probability of each text of three tokens, enumerated."""
    step = np.stack([filtered_probability(row, *SETTINGS) for row in TARGET])
    return (step[0][:, None, None] * step[:, :, None] * step).ravel()


def p_value(sampled: np.ndarray, vocab: int, probability: np.ndarray, least: float = 0) -> float:
    return chi_square(sampled @ vocab ** np.arange(TOKENS)[::-1], probability, least)


@pytest.mark.parametrize("drafts", tiers(RIGHT, quick=[], long=[left_to_right_drafts]))
def test_both_rules_give_the_targets_distribution(drafts):
    assert p_value(texts(drafts, SAMPLES), VOCAB, target_distribution()) > 1e-3


@pytest.mark.parametrize("drafts", WRONG)
def test_wrong_rules_are_noticed(drafts):
    assert p_value(texts(drafts, PART), VOCAB, target_distribution()) < 1e-3


@jax.jit
def narrow_drafts():
    """Drafts of three tokens beside the rule's picks, under `q` of several widths."""
    options, count = sampling(1), 1000
    positions, drafted = jnp.arange(count)[None], jnp.ones((1, count), bool)
    logits = jnp.broadcast_to(jnp.asarray(TARGET[0]), (1, count, VOCAB))
    draft, q = picking.sample_draft(logits.at[..., 3:].set(-jnp.inf), positions, options)
    return draft, [
        picking.pick_or_reject(logits, positions, options, draft, resized, drafted)
        for resized in (q[..., :3], q, jnp.pad(q, ((0, 0), (0, 0), (0, 4))))
    ]


def test_vocabularies_may_differ():
    """Ids that only one of the models has are never drafted: they change nothing."""
    draft, (narrow, exact, wide) = narrow_drafts()
    assert narrow.tolist() == exact.tolist() == wide.tolist()
    assert 0.2 < (narrow == draft).mean() < 0.95
    assert set(np.unique(draft)) == {0, 1, 2} and set(np.unique(narrow)) == set(range(VOCAB))


# With models.

SMALL = 6
"""Tokens of the target; the drafter has a mask beside them."""


@functools.cache
def small_target():
    return random_model(tiny_config(vocab_size=SMALL, num_layers=1), seed=1, gain=2.0)


def sampling_drafter(kind: str):
    if kind == "ar":
        model = random_model(tiny_config(vocab_size=SMALL, num_layers=1), seed=5)
        return Autoregressive(model=model, vocab=SMALL, spec_len=2, sampled=True)
    if kind == "eagle3":
        model = random_eagle(small_target(), seed=3, draft_ids=np.asarray([0, 2, 3, 5]))
        return EagleChain(model=model, spec_len=2, max_spec_len=2, sampled=True)
    if kind in ("dspark", "dflash"):
        heads = {} if kind == "dspark" else {"markov": None, "markov_rank": 0, "confidence": False}
        heads |= {"confidence_sees_markov": False, "feature_layers": (0,)}
        model = random_dspark(small_target(), rows=2, seed=3, draft_ids=np.asarray([0, 2, 3, 5]), **heads)
        # The cut depends on drafted tokens, as the confidence head's does: never on the token that it is about.
        return FeatureBlockDrafter(model=model, spec_len=2, max_spec_len=2, cut=np.float32(0.4), sampled=True)
    config = diffusion_config(block_size=4, vocab_size=SMALL + 1, mask_token_id=SMALL)
    model = random_model(config, seed=2, gain=2.0)
    rule = BelowThreshold(np.float32(0.55))
    return Wide(model=model, vocab=SMALL, rule=rule, spec_len=1, max_spec_len=2, sampled=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", tiers(["wide", "ar", "eagle3", "dspark", "dflash"], quick=[], long=["dspark"]))
def test_rounds_with_sampled_drafts_give_the_targets_distribution(kind):
    """From prompt to text: chunks, expansion, caches, bonus tokens; and at temperature 0 the greedy text."""
    target, drafter = small_target(), sampling_drafter(kind)
    samples, greedy, prompt = 4_900, 100, jnp.asarray([[3, 1, 4]])
    temperature, top_k, top_p = 0.9, 5, 0.95
    plan = decoding.Plan((4,), (32,), (32,))

    def answer(case):
        sequence, temperature = case
        options = sampling(1, temperature, top_k, top_p, seed=4, sequence=sequence)
        lengths, limits = jnp.asarray([3]), jnp.asarray([TOKENS])
        state = prefilled(target, drafter, plan, prompt, lengths, limits, sampling=options, capacity=8)
        state = decoding.generate(target, drafter, state, plan=plan)
        return state.tokens[0, 3 : 3 + TOKENS], state.log.accepted[0], state.log.draft_length[0]

    temperatures = np.repeat(np.asarray([temperature, 0], np.float32), [samples, greedy])
    cases = np.arange(samples + greedy), temperatures
    texts, accepted, lengths = jax.device_get(jax.jit(lambda: jax.lax.map(answer, cases, batch_size=500))())
    sampled, accepted, lengths = texts[:samples], accepted[:samples], lengths[:samples]
    first = list(itertools.product(range(SMALL), repeat=TOKENS - 1))
    logits = np.asarray(target.logits(np.asarray([[3, 1, 4, *tokens] for tokens in first], np.int32)))
    step = functools.lru_cache(lambda row, at: filtered_probability(logits[row, at], temperature, top_k, top_p))
    probability = np.concatenate([step(0, 2)[a] * step(row, 3)[b] * step(row, 4) for row, (a, b) in enumerate(first)])
    assert p_value(sampled, SMALL, probability, least=5) > 1e-3
    assert p_value(sampled, SMALL, np.full(SMALL**TOKENS, SMALL ** -float(TOKENS)), least=5) < 1e-3
    # The premise: drafts of both lengths, accepted and not.
    seen = {(int(a), int(d)) for a, d in zip(accepted.ravel(), lengths.ravel()) if d}
    assert seen == {(0, 2), (1, 2), (2, 2)} | ({(0, 1), (1, 1)} if kind == "wide" else set())
    best = logits.argmax(-1)
    second = best[first.index((best[0, 2], 0)), 3]
    greedy_text = [best[0, 2], second, best[first.index((best[0, 2], second)), 4]]
    assert np.unique(texts[samples:], axis=0).tolist() == [greedy_text]
