"""DFlash and DSpark drafters with random weights: no token changes, and every draft is what the network says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiers
from tiny_models import VOCAB, random_dspark, random_extended, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.models.block_network import DSpark, bind
from failfast_jax.train.block_start import copy_parameters
from failfast_jax.train.feature_cache import target_features

ROWS = 4
KINDS = {
    "dflash": {"own_row": True, "markov": None, "markov_rank": 0, "confidence": False, "confidence_sees_markov": False},
    "vanilla": {},
    "gated": {"markov": "gated", "confidence_sees_markov": False},
    "rnn": {"markov": "rnn"},
    "narrow": {"draft_ids": np.arange(3, VOCAB - 5), "markov_rank": 16},
    "sliding": {"sliding_windows": (6,)},
    "extended": {"context_layers": (0, 1), "row_features": (2, 0), "draft_ids": np.arange(3, VOCAB - 5)},
}
HEADS = {"markov": "vanilla", "markov_rank": 16, "confidence": True, "confidence_sees_markov": True}


@functools.cache
def target():
    return random_model(tiny_config(num_layers=3))


@functools.cache
def engine(kind: str) -> FailFast:
    changes = dict(KINDS[kind])
    if kind == "extended":
        return FailFast(target(), random_extended(target(), rows=ROWS, seed=3, **changes, **HEADS))
    return FailFast(target(), random_dspark(target(), rows=ROWS + (kind == "dflash"), seed=3, **changes))


def prompts(seed: int, lengths=(9, 14, 1)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in lengths]


@functools.cache
def one_pass(kind: str):
    @jax.jit
    def run(model, tokens, rows, given, at):
        features = target_features(target(), tokens, model.config.feature_layers)
        inputs = model.network.inputs(model.embed, rows[None, None], given[None, None], features[:, None, at - 1])
        return model.network.blocks(inputs, features, at[None, None])[0, 0]

    return run


def looked_at(kind: str, ids: list[int], rows: np.ndarray, given: np.ndarray) -> jax.Array:
    """Hidden states of a pass over rows behind `ids`: whole sequences, no cache."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    return one_pass(kind)(engine(kind).drafter, tokens, rows, given, jnp.int32(len(ids) - 1))


def chunk(kind: str, ids: list[int], drafted: list[int], first: int) -> list[tuple[int, float]]:
    """Tokens and confidences of one pass, for the places `first ...` of a draft: no cache, no scan."""
    model, network = engine(kind).drafter, engine(kind).drafter.network
    config, known = network.config, [ids[-1], *drafted[:first]]
    count = -(-(first + ROWS + config.own_row) // config.block_size) * config.block_size
    hidden = looked_at(kind, ids, np.resize(known, count), np.arange(count) < len(known))
    found, state, before = [], jnp.zeros(config.markov_rank), None
    for place, last in enumerate([ids[-1], *drafted[: first + ROWS - 1]]):
        here = hidden[place + config.own_row]
        logits = model.logits(here)
        if network.markov is not None:
            before = network.markov.embedded(jnp.asarray(last))
            state, code = network.markov.step(state, before, here)
            logits += network.markov.bias(code)
        logits = model.over_vocabulary(logits)
        sure = jax.nn.softmax(logits).max()
        if network.confidence is not None:
            sure = jax.nn.sigmoid(network.confidence_logits(here, before))
        found.append((int(logits.argmax()), float(sure)))
    return found[first:]


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sliding"])
def test_drafts_are_what_the_network_says(kind):
    """Over two blocks, where it may: the second sees the first as known rows."""
    blocks = 1 if kind == "extended" else 2
    options = {"max_new_tokens": 12, "tau": 0.0, "ignore_eos": True, "method": "failfast"}
    for result in engine(kind).generate(prompts(0, (9, 14)), **options):
        ids = list(result.prompt_ids)
        for round in result.rounds[:2]:
            assert (len(round.drafted), round.passes) == (blocks * ROWS, blocks)
            expected = [row for block in range(blocks) for row in chunk(kind, ids, round.drafted, block * ROWS)]
            assert round.drafted == [token for token, _ in expected]
            np.testing.assert_allclose(round.confidence, [sure for _, sure in expected], rtol=2e-3)
            ids += round.emitted


OPTIONS = {
    "dspark": {"method": "dspark", "confidence_threshold": 0.3},
    "cut": {"method": "failfast", "tau": 0.5},
    "long": {"method": "failfast", "tau": 0.1, "spec_len": 3, "max_spec_len": 11},
    "auto": {"method": "auto"},
    "reuse": {"method": "failfast", "tau": 0.4, "reuse": True},
}


def own(kind: str) -> dict[str, str]:
    return {"method": engine(kind).drafter.method}


@pytest.mark.parametrize(
    ("kind", "how"),
    tiers(
        [
            *((kind, "own") for kind in KINDS),
            *(("vanilla", how) for how in OPTIONS),
            *(("extended", how) for how in ("dspark", "auto")),
            ("rnn", "long"),
        ],
        quick=[("vanilla", "own")],
        long=[("rnn", "own"), ("vanilla", "reuse"), ("extended", "own")],
    ),
)
@settings(max_examples=5)
@given(seed=st.integers(0, 99), tokens=st.integers(1, 40), heat=st.sampled_from([0.0, 0.0, 0.9]))
def test_no_token_changes(kind, how, seed, tokens, heat):
    common = {"max_new_tokens": tokens, "temperature": heat, "seed": seed, "exact": True}
    drafted = engine(kind).generate(prompts(seed), **common, **OPTIONS.get(how, own(kind)))
    plain = engine(kind).generate(prompts(seed), method="vanilla", **common)
    assert [result.output_ids for result in drafted] == [result.output_ids for result in plain]


def test_near_the_end_of_the_context():
    for kind in ("dflash", "rnn"):
        options = {"max_new_tokens": 300, "ignore_eos": True, **own(kind)}
        [full] = engine(kind).generate([prompts(1)[0]], **options)
        assert len(full.output_ids) == 256 - 9 and full.finish_reason == "length"


def test_a_backbone_drafts_without_its_heads():
    """As the same network drafts that was made without them."""
    model = engine("gated").drafter
    bare = model.without_heads()
    alone = DSpark(bare.config, rngs=nnx.Rngs(0))
    copy_parameters(alone, model.network)
    options = {"method": "dflash", "max_new_tokens": 24, "ignore_eos": True}
    made = [FailFast(target(), one).generate(prompts(2), **options) for one in (bind(alone, target()), bare)]
    made.append(engine("gated").generate(prompts(2), **options))
    rounds = [[result.rounds for result in results] for results in made]
    assert rounds[0] == rounds[1] == rounds[2]
    assert bare.without_heads() is bare and engine("gated").drafter.network.markov is not None
    with_heads = engine("gated").generate(prompts(2), **options | own("gated"))
    assert [r.output_ids for r in with_heads] == [r.output_ids for r in made[0]]
    assert [r.rounds for r in with_heads] != rounds[0]


REFUSED = [
    ("dflash", {"method": "dspark"}, "no Markov or confidence head, as --method dspark needs"),
    ("vanilla", {"method": "ar"}, "use --method dspark"),
    ("vanilla", {"method": "dspark", "confidence_threshold": 1.5}, "--confidence-threshold 1.5: must be in"),
    ("dflash", {"confidence_threshold": 0.5}, "--method auto has no such option, only --method dspark"),
    ("vanilla", {"method": "failfast", "spec_len": 5}, "--spec-len 5: this drafter fills up to 4"),
    ("extended", {"max_spec_len": 5}, "--max-spec-len 5: this drafter fills up to 4"),
    ("vanilla", {"method": "failfast", "schedule": "aligned"}, "--schedule aligned: needs a drafter"),
]


@pytest.mark.parametrize("kind, options, message", REFUSED)
def test_refusals(kind, options, message):
    with pytest.raises((ConfigError, OptionError), match=message):
        engine(kind).generate(prompts(0), **options)
