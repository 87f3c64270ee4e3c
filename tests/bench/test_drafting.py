"""`bench micro --parts drafting` on a tiny drafter."""

from __future__ import annotations

from tiny_models import random_dspark, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import drafting


def test_a_draft_beside_the_reading_of_its_weights(monkeypatch):
    """What is read: everything of the drafter's but the table of which it reads a row."""
    monkeypatch.setattr(drafting, "REPEATS", 1)
    target = random_model(tiny_config(num_layers=3))
    size = target.config.vocab_size
    read = {}
    for kind, rank in (("vanilla", 4), (None, 0)):
        plain = {"confidence": False, "confidence_sees_markov": False}
        drafter = random_dspark(target, markov=kind, markov_rank=rank, **plain)
        found = drafting.drafting_report(FailFast(target, drafter), [3, 9, 27])
        assert found["rows"] == drafter.rows and found["over_reading"] > 0
        assert ("markov_share" in found) == (kind is not None)
        assert set(found["ms"]) == {"draft", "reading"} | ({"markov", "without_heads"} if kind else set())
        read[kind] = found["weight_bytes"]
    assert read["vanilla"] - read[None] == 4 * 4 * size
