"""The hybrid as it is configured on CPU, where a lookup drafts 15 tokens at once."""

from __future__ import annotations

import pytest
from test_conditioned import DRAFT_IDS, network
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.models.conditioned import bind


@pytest.mark.parametrize("options", [{"max_spec_len": 4}, {"exact": True}], ids=lambda o: next(iter(o)))
def test_lookups_and_the_drafter_take_turns(options):
    target = random_model(tiny_config(num_layers=3))
    engine = FailFast(target, bind(network(target), target, DRAFT_IDS))
    prompts = [[9, 8, 3, 4, 10, 11, 12, 13, 14, 15, 3, 4], [2, 7, 5]]
    common = {"max_new_tokens": 32, "ignore_eos": True, "exact": options.get("exact", False)}
    plain = engine.generate(prompts, method="vanilla", **common)
    hybrid = engine.generate(prompts, lookup_min=2, min_gain=0.5, **common | options)
    assert [r.output_ids for r in hybrid] == [r.output_ids for r in plain]
    lengths = {(len(round.drafted), round.passes) for result in hybrid for round in result.rounds}
    longest = options.get("max_spec_len", 15)
    assert (longest, 0) in lengths  # a lookup leaves the drafter nothing to add
    assert any(passes for _, passes in lengths) and max(length for length, _ in lengths) == longest
    assert (0, 0) in lengths or (0, 1) in lengths  # plain steps
