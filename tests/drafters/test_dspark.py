"""DFlash and DSpark drafters with random weights: no token changes, and every draft is what the network says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, random_dspark, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.train.features import target_features

ROWS = 4
KINDS = {
    "dflash": {"own_row": True, "markov": None, "markov_rank": 0, "confidence": False, "confidence_sees_markov": False},
    "vanilla": {},
    "gated": {"markov": "gated", "confidence_sees_markov": False},
    "rnn": {"markov": "rnn"},
    "narrow": {"draft_ids": np.arange(3, VOCAB - 5)},
    "sliding": {"sliding_windows": (6,)},
}


@functools.cache
def target():
    return random_model(tiny_config(num_layers=3))


@functools.cache
def engine(kind: str) -> FailFast:
    changes = dict(KINDS[kind])
    return FailFast(target(), random_dspark(target(), rows=ROWS + (kind == "dflash"), seed=3, **changes))


def prompts(seed: int, lengths=(9, 14, 1)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in lengths]


def chunk(kind: str, ids: list[int], drafted: list[int], first: int) -> list[tuple[int, float]]:
    """Tokens and confidences of one pass, for the places `first ...` of a draft: whole sequences, no cache, no scan."""
    model, network = engine(kind).drafter, engine(kind).drafter.network
    config, known = network.config, [ids[-1], *drafted[:first]]
    count = -(-(first + ROWS + config.own_row) // config.block_size) * config.block_size
    given, rows = np.arange(count) < len(known), np.resize(known, count)
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    features = target_features(target(), tokens, config.feature_layers)
    inputs = network.inputs(model.embed, rows[None, None], given[None, None], features[:, None, len(ids) - 2])
    hidden = network.blocks(inputs, features, np.asarray([[len(ids) - 1]]))[0, 0]
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sliding"])
def test_drafts_are_what_the_network_says(kind):
    """Over two blocks: the second sees the first as known rows."""
    options = {"max_new_tokens": 12, "tau": 0.0, "ignore_eos": True, "method": "failfast"}
    for result in engine(kind).generate(prompts(0, (9, 14)), **options):
        ids = list(result.prompt_ids)
        for round in result.rounds[:2]:
            assert (len(round.drafted), round.passes) == (2 * ROWS, 2)
            expected = chunk(kind, ids, round.drafted, 0) + chunk(kind, ids, round.drafted, ROWS)
            assert round.drafted == [token for token, _ in expected]
            np.testing.assert_allclose(round.confidence, [sure for _, sure in expected], rtol=2e-3)
            ids += round.emitted


OPTIONS = {
    "own": {},
    "cut": {"method": "failfast", "tau": 0.5},
    "long": {"method": "failfast", "tau": 0.1, "spec_len": 3, "max_spec_len": 11},
    "hybrid": {"method": "failfast", "tau": 0.3, "lookup_min": 1},
    "careful": {"method": "failfast", "tau": 0.3, "lookup_min": 1, "min_gain": 0.5},
    "tree": {"method": "failfast", "tau": 0.4, "tree_budget": 12},
    "reuse": {"method": "failfast", "tau": 0.4, "reuse": True},
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [*((kind, "own") for kind in KINDS), *(("vanilla", how) for how in OPTIONS if how != "own"), ("rnn", "long")],
)
@settings(max_examples=5)
@given(seed=st.integers(0, 99), tokens=st.integers(1, 40), heat=st.sampled_from([0.0, 0.0, 0.9]))
def test_no_token_changes(kind, how, seed, tokens, heat):
    common = {"max_new_tokens": tokens, "temperature": heat, "seed": seed, "exact": how != "tree"}
    drafted = engine(kind).generate(prompts(seed), **common, **OPTIONS[how])
    plain = engine(kind).generate(prompts(seed), method="vanilla", **common)
    assert [result.output_ids for result in drafted] == [result.output_ids for result in plain]


def test_near_the_end_of_the_context():
    for kind in ("dflash", "rnn"):
        options = {"max_new_tokens": 300, "ignore_eos": True}
        [full] = engine(kind).generate([prompts(1)[0]], **options)
        assert len(full.output_ids) == 256 - 9 and full.finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("dflash", {"method": "dspark"}, ConfigError, "for --method dflash"),
        ("vanilla", {"method": "dflash"}, ConfigError, "for --method dspark"),
        ("vanilla", {"method": "ar"}, ConfigError, "use --method dspark"),
        ("vanilla", {"confidence_threshold": 1.5}, OptionError, "--confidence-threshold 1.5: must be in"),
        ("dflash", {"confidence_threshold": 0.5}, OptionError, "--method dflash has no such option, only dspark"),
        ("vanilla", {"method": "failfast", "spec_len": 5}, OptionError, "--spec-len 5: this drafter fills up to 4"),
        ("vanilla", {"method": "failfast", "schedule": "aligned"}, OptionError, "standalone block-diffusion drafter"),
    ],
)
def test_refusals(kind, options, error, message):
    with pytest.raises(error, match=message):
        engine(kind).generate(prompts(0), **options)
