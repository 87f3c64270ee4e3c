"""Drafts that are often right: long accepted runs end everywhere, and the text stays the target's own."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.engine import Result

FAVOURITE = 7
METHODS = {
    "vanilla": {},
    "wide": {"method": "failfast", "spec_len": 3, "max_spec_len": 9},
    "aligned": {"method": "failfast", "schedule": "aligned", "spec_len": 3, "max_spec_len": 9},
    "fast-dllm": {"spec_len": 6},
    "lookup": {"max_spec_len": 7},
}
PROMPTS = [[3, 4, 5] * 6, [9]]


def fond_of(model, strength: float):
    """Pulls every prediction towards one token; the rest of the distribution still depends on the context."""
    model.embed[...] = jnp.asarray(model.embed[...]).at[:, 0].set(4.0)
    head = model.head.weight
    head[...] = jnp.asarray(head[...]).at[FAVOURITE, 0].add(strength)
    return model


@functools.cache
def engine() -> FailFast:
    target = fond_of(random_model(tiny_config(num_layers=1), seed=1, gain=2.0), 2.0)
    return FailFast(target, fond_of(random_model(diffusion_config(), seed=2, gain=2.0), 4.0))


@functools.cache
def answers(method: str, seed: int, stop: int | None = None) -> list[Result]:
    pair = engine()
    pair.eos_token_ids = () if stop is None else (stop,)
    options = {"method": method} | METHODS[method]
    return pair.generate(
        PROMPTS, temperature=1.0, seed=seed, max_new_tokens=80, tau=0.3, small_block_size=4, exact=True, **options
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", [name for name in METHODS if name != "vanilla"])
def test_the_text_is_the_targets(method, seed):
    for one, other in zip(answers("vanilla", seed), answers(method, seed)):
        assert other.output_ids == one.output_ids


@pytest.mark.parametrize("stop", range(0, VOCAB, 3))
@pytest.mark.parametrize("method", ["wide", "lookup"])
def test_stop_tokens_inside_long_drafts(method, stop):
    for free, one, other in zip(answers("vanilla", 0), answers("vanilla", 0, stop), answers(method, 0, stop)):
        at = free.output_ids.index(stop) + 1 if stop in free.output_ids else len(free.output_ids)
        assert one.output_ids == other.output_ids == free.output_ids[:at]
        assert one.finish_reason == other.finish_reason == ("eos" if stop in free.output_ids else "length")


def test_runs_of_all_lengths_were_accepted():
    """What the tests above rest on: drafts cut short at every place, and whole ones of several chunks."""
    rounds = [entry for seed in range(4) for result in answers("wide", seed) for entry in result.rounds]
    assert {entry.accepted for entry in rounds} >= set(range(8))
    assert sum(entry.accepted == len(entry.drafted) == 9 for entry in rounds) >= 3
    texts = {tuple(result.output_ids) for seed in range(4) for result in answers("vanilla", seed)}
    assert len(texts) == 8 and all(len(set(text)) > 5 for text in texts)
    assert np.mean([entry.accepted for entry in rounds]) > 1.5
