"""DFlash and DSpark drafters with random weights: every draft is what the network says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import VOCAB, random_dspark, random_extended, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.train.feature_cache import target_features

ROWS = 4
KINDS = {
    "dflash": {"own_row": True, "markov": None, "markov_rank": 0, "confidence": False, "confidence_sees_markov": False},
    "gated": {"markov": "gated", "confidence_sees_markov": False},
    "rnn": {"markov": "rnn"},
    "narrow": {"draft_ids": np.arange(3, VOCAB - 5), "markov_rank": 16},
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


@jax.jit
def one_pass(model, tokens, rows, known, at):
    """Hidden states of a pass over rows after `tokens[: at + 1]`: whole sequences, no cache."""
    features = target_features(target(), tokens, model.config.feature_layers)
    inputs = model.network.inputs(model.embed, rows[None, None], known[None, None], features[:, None, at - 1])
    return model.network.blocks(inputs, features, at[None, None])[0, 0]


def chunk(kind: str, heads: bool, ids: list[int], drafted: list[int], places: range) -> list[tuple[int, float]]:
    """Tokens and confidences of one pass, for these places of a draft: no cache, no scan."""
    model, network = engine(kind).drafter, engine(kind).drafter.network
    config, known = network.config, [ids[-1], *drafted[: places.start]]
    count = -(-(places.stop + config.own_row) // config.block_size) * config.block_size
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    hidden = one_pass(model, tokens, np.resize(known, count), np.arange(count) < len(known), jnp.int32(len(ids) - 1))
    chosen, state, before = [], jnp.zeros(config.markov_rank), None
    for place, last in enumerate([ids[-1], *drafted][: places.stop]):
        here = hidden[place + config.own_row]
        logits = model.logits(here)
        if heads and network.markov is not None:
            before = network.markov.embedded(jnp.asarray(last))
            state, code = network.markov.step(state, before, here)
            logits += network.markov.bias(code)
        logits = model.over_vocabulary(logits)
        confidence = jax.nn.softmax(logits).max()
        if heads and network.confidence is not None:
            confidence = jax.nn.sigmoid(network.confidence_logits(here, before))
        chosen.append((int(logits.argmax()), float(confidence)))
    return chosen[places.start :]


CASES = [*((kind, "failfast", ROWS, 2 * ROWS) for kind in KINDS if kind != "extended")]
CASES += [("extended", "failfast", 2, ROWS), ("gated", "dflash", ROWS, ROWS)]
"""Kind, method, tokens of a pass, tokens of a draft: later passes see the first ones as known rows."""


@pytest.mark.parametrize("kind, method, step, longest", tiers(CASES, quick=CASES[-2:], long=None))
def test_drafts_are_what_the_network_says(kind, method, step, longest):
    """`dflash` drafts without the heads."""
    options = {"method": method, "max_new_tokens": 12, "ignore_eos": True}
    if method == "failfast":
        options |= {"tau": 0.0, "spec_len": step, "max_spec_len": longest}
    prompts = [np.random.default_rng(0).integers(2, VOCAB, length).tolist() for length in (9, 14)]
    for result in engine(kind).generate(prompts, **options):
        ids = list(result.prompt_ids)
        for entry in result.rounds[:2]:
            assert (len(entry.drafted), entry.passes) == (longest, longest // step)
            expected = []
            for start in range(0, longest, step):
                expected += chunk(kind, method == "failfast", ids, entry.drafted, range(start, start + step))
            assert entry.drafted == [token for token, _ in expected]
            np.testing.assert_allclose(entry.confidence, [confidence for _, confidence in expected], rtol=2e-3)
            ids += entry.emitted


def test_refusals():
    with pytest.raises(ConfigError, match="no Markov or confidence head, as --method dspark needs"):
        engine("dflash").generate([[3]], method="dspark")
    with pytest.raises(OptionError, match="--max-spec-len 5: this drafter fills up to 4"):
        engine("extended").generate([[3]], max_spec_len=5)
