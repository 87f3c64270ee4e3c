"""EAGLE-3's chains and trees on random models: nothing is lost, and what is kept is final."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from tiny_models import VOCAB, fond_eagle, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig, decoding
from failfast_jax.decoding.decode_state import RUNNING
from failfast_jax.drafters.eagle3 import EagleTree
from failfast_jax.engine import Result
from failfast_jax.policy import cost_book
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.runtime.model_runtime import Request

FAVOURITE, CAPACITY = 7, 72
DRAFT_IDS = np.asarray([i for i in range(VOCAB) if i % 3], np.int32)
TREE = {"tree_budget": 15, "tree_depth": 3, "tree_top_k": 3}
WAYS = {"chain": {"method": "eagle3", "spec_len": 3}, "tree": {"method": "eagle3", **TREE}}


@functools.cache
def engine() -> FailFast:
    target = random_model(tiny_config(num_layers=2), seed=1, gain=2.0)
    target.embed[...] = target.embed[...].at[:, 0].set(4.0)
    target.head.weight[...] = target.head.weight[...].at[FAVOURITE, 0].add(1.5)
    made = FailFast(target, fond_eagle(target, FAVOURITE, seed=4, draft_ids=DRAFT_IDS, layers=(-1, 0, 1)))
    made.runtime.max_seq_len = CAPACITY
    return made


def answers(prompts: list[list[int]], stop: int | None, **options) -> list[Result]:
    engine().eos_token_ids = () if stop is None else (stop,)
    return engine().generate(prompts, **options)


drafted = jax.jit(decoding.draft)


@pytest.mark.parametrize("way", ["chain", "tree"])
def test_only_final_pairs_stay(way):
    """After some rounds the state is that of a fresh prefill of the text, whatever the drafts left in the cache."""
    drafter = engine().build_drafter(GenerationConfig(**WAYS[way]))
    session = engine().runtime.session(drafter, batch=2, capacity=CAPACITY)
    requests = [Request([3, 4, 5, 6], 60, temperature=0.7), Request([9] * 8, 60, temperature=0.7, sequence=1)]
    state = session.advance(session.prefill(requests), rounds=7)
    progress = session.read(state)
    assert progress.finish == [RUNNING] * 2
    found, lengths = jax.device_get((state.drafter, state.length))
    texts = [[*request.prompt, *ids] for request, ids in zip(requests, progress.ids)]
    fresh = jax.device_get(session.prefill([Request(text, 10) for text in texts]).drafter)
    np.testing.assert_allclose(found.hidden, fresh.hidden, atol=2e-4)
    for row, length in enumerate(lengths):
        assert length == len(texts[row]) > 15
        for one, other in ((found.cache.k, fresh.cache.k), (found.cache.v, fresh.cache.v)):
            np.testing.assert_allclose(one[0][row, :, : length - 1], other[0][row, :, : length - 1], atol=2e-4)


def paths(tokens: list[int], parent: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, at in zip(tokens, parent):
        assert at < len(found)
        found.append((*(found[at] if at >= 0 else ()), token))
    return found


def test_a_tree_fits_the_room_and_its_draft_is_one_of_its_paths():
    """Nodes beyond the room are left out, and then their places go to others."""
    drafter = engine().build_drafter(GenerationConfig(**WAYS["tree"]))
    assert isinstance(drafter, EagleTree) and drafter.max_draft == 15
    session = engine().runtime.session(drafter, batch=4, capacity=CAPACITY)
    prompts = [list(range(length)) for length in (CAPACITY - 4, CAPACITY - 3, CAPACITY - 2, 5)]
    draft, _ = drafted(session.drafter, session.prefill([Request(prompt, 8) for prompt in prompts]))
    draft = jax.device_get(draft)
    sizes = []
    for row in range(4):
        size, length = int(draft.tree.size[row]), int(draft.length[row])
        found = paths(draft.tree.tokens[row, :size].tolist(), (draft.tree.parent[row, :size] - 1).tolist())
        assert len(set(found)) == size and length == max(map(len, found))
        assert tuple(draft.tokens[row, :length].tolist()) in found
        sizes.append((size, length))
    assert [length for _, length in sizes[:3]] == [3, 2, 1]
    assert [size for size, _ in sizes] == [15, 12, 3, 15] and sizes[3][1] >= 3


def test_rounds_show_their_trees():
    (result,) = engine().generate([[3, 4, 5]], **WAYS["tree"], max_new_tokens=12, ignore_eos=True)
    for entry in result.to_dict()["rounds"]:
        assert set(entry["tree"]) == {"tokens", "parent"} and len(entry["tree"]["tokens"]) == TREE["tree_budget"]
        assert tuple(entry["drafted"][: entry["accepted"]]) in {(), *paths(**entry["tree"])}
    (result,) = engine().generate([[3, 4, 5]], **WAYS["chain"], max_new_tokens=12, ignore_eos=True)
    assert all("tree" not in entry for entry in result.to_dict()["rounds"])


def test_passes_beyond_the_budget_are_not_made():
    """Of a tree of two nodes none is deeper than 2: one pass for the first level, one for the second."""
    prompt, common = [[3, 4, 5, 6, 7]], {"method": "eagle3", "tree_budget": 2, "tree_top_k": 2, "max_new_tokens": 8}
    deep, flat = (answers(prompt, None, tree_depth=depth, **common)[0] for depth in (12, 1))
    assert {entry.passes for entry in deep.rounds} == {2}
    assert [entry.tree for entry in deep.rounds] == [entry.tree for entry in flat.rounds]


def test_chains_of_auto_end_where_another_pass_does_not_pay(monkeypatch):
    drafter = engine().build_drafter(GenerationConfig("auto", max_spec_len=6))
    assert (drafter.model.spec_len, drafter.model.max_spec_len) == (1, 6)
    widths = engine().runtime.plan(drafter).widths
    costs = Costs.of(np.interp(widths, (1, 16), (1.0, 1.1)), 0.1)
    monkeypatch.setattr(cost_book, "measure", lambda session: costs)
    engine().runtime.costs = cost_book.CostBook()
    results = answers([[3, 4, 5] * 4, [9] * 8, [20]], None, method="auto", max_spec_len=6, max_new_tokens=60)
    engine().runtime.costs = cost_book.CostBook()
    passes = {entry.passes for result in results for entry in result.rounds}
    assert len(passes - {0}) >= 2 and max(passes) <= 6
