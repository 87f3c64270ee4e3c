"""EAGLE-3's chains and trees on random models; `test_field_eagle` has the published ones."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from tiny_models import VOCAB, fond_eagle, fond_of, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig, decoding
from failfast_jax.policy import cost_book
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.runtime.model_runtime import Request

FAVOURITE, CAPACITY = 7, 72
DRAFT_IDS = np.asarray([i for i in range(VOCAB) if i % 3], np.int32)


@functools.cache
def engine() -> FailFast:
    target = fond_of(random_model(tiny_config(num_layers=2), seed=1, gain=2.0), {FAVOURITE: 1.5})
    pair = FailFast(target, fond_eagle(target, FAVOURITE, seed=4, draft_ids=DRAFT_IDS, layers=(-1, 0, 1)))
    pair.runtime.max_seq_len = CAPACITY
    return pair


def paths(tokens: list[int], parent: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node; a parent of 0 is the root."""
    nodes = [()]
    for token, at in zip(tokens, parent):
        nodes.append((*nodes[at], token))
    return nodes[1:]


def test_a_tree_fits_the_room_and_its_draft_is_one_of_its_paths():
    """Nodes beyond the room are left out, and then their places go to others."""
    drafter = engine().build_drafter(GenerationConfig("eagle3", tree_budget=15, tree_depth=3, tree_top_k=3))
    assert drafter.max_draft == 15
    # Of a tree of two nodes none is deeper than 2: one pass for the first level, one for the second.
    assert engine().build_drafter(GenerationConfig("eagle3", tree_budget=2, tree_depth=12)).depth == 1
    session = engine().runtime.session(drafter, batch=4, capacity=CAPACITY)
    prompts = [list(range(length)) for length in (CAPACITY - 4, CAPACITY - 3, CAPACITY - 2, 5)]
    state = session.prefill([Request(prompt, 8) for prompt in prompts])
    draft, _ = jax.device_get(jax.jit(decoding.draft)(session.drafter, state))
    assert draft.tree.size.tolist() == [15, 12, 3, 15]
    assert draft.length[:3].tolist() == [3, 2, 1] and draft.length[3] >= 3
    for row, (size, length) in enumerate(zip(draft.tree.size, draft.length)):
        nodes = paths(draft.tree.tokens[row, :size].tolist(), draft.tree.parent[row, :size].tolist())
        assert len(set(nodes)) == size and length == max(map(len, nodes))
        assert tuple(draft.tokens[row, :length].tolist()) in nodes


@pytest.mark.long
def test_chains_of_auto_end_where_another_pass_does_not_pay(monkeypatch):
    drafter = engine().build_drafter(GenerationConfig("auto", max_spec_len=6))
    assert (drafter.model.spec_len, drafter.model.max_spec_len) == (1, 6)
    widths = engine().runtime.plan(drafter).widths
    costs = Costs.of(np.interp(widths, (1, 16), (1.0, 1.1)), 0.1)
    monkeypatch.setattr(cost_book, "measure", lambda session: costs)
    options = {"method": "auto", "max_spec_len": 6, "max_new_tokens": 60, "ignore_eos": True}
    results = engine().generate([[3, 4, 5] * 4, [9] * 8, [20]], **options)
    passes = {entry.passes for result in results for entry in result.rounds}
    assert len(passes - {0}) >= 2 and max(passes) <= 6
