"""EAGLE-3's chains and trees on random models: nothing is lost, and what is kept is final."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, fond_eagle, prefilled, random_model, tiny_config

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
WAYS = {
    "chain": {"method": "eagle3", "spec_len": 3},
    "tree": {"method": "eagle3", **TREE},
    "failfast": {"method": "failfast", "tau": 0.3, "max_spec_len": 7},
    "auto": {"method": "auto", "max_spec_len": 7},
}


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


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12)
@given(data=st.data())
def test_the_text_is_vanillas(way, data):
    """Batches, one-token prompts, stop tokens inside drafts, the cache's end, and every temperature."""
    prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
    prompts = data.draw(st.sampled_from([1, 3]).flatmap(lambda n: st.lists(prompt, min_size=n, max_size=n)))
    options = {
        "max_new_tokens": data.draw(st.sampled_from([1, 20, 80])),
        "temperature": data.draw(st.sampled_from([0.0, 0.7, 1.2])),
        "seed": data.draw(st.integers(0, 3)),
    }
    stop = data.draw(st.none() | st.integers(0, VOCAB - 1))
    expected = answers(prompts, stop, method="vanilla", **options)
    for one, other in zip(expected, answers(prompts, stop, **WAYS[way], **options)):
        assert (other.output_ids, other.finish_reason) == (one.output_ids, one.finish_reason)
        assert [token for round in other.rounds for token in round.emitted] == one.output_ids


@pytest.mark.long
def test_drafts_were_right_and_wrong():
    """What the tests above rest on."""
    seen = {}
    for way, options in WAYS.items():
        options = options | {"max_new_tokens": 40, "temperature": 0.7}
        results = answers([[3, 4, 5], [9] * 8, [20]], None, **options)
        rounds = [round for result in results for round in result.rounds]
        seen[way] = {(len(round.drafted), round.accepted) for round in rounds}
        assert np.mean([round.accepted for round in rounds]) > 0.5
        assert all(set(round.drafted) <= set(DRAFT_IDS.tolist()) for round in rounds if way in ("chain", "failfast"))
    assert seen["chain"] >= {(3, 0), (3, 3)}
    assert {accepted for _, accepted in seen["tree"]} >= {0, 1, 2}
    assert len({length for length, _ in seen["failfast"]}) >= 3
    # A one-token prompt has no features in front of it: its first round is a plain step.
    assert results[2].rounds[0].drafted == [] and answers([[20]], None, **WAYS["tree"])[0].rounds[0].tree is None


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
    draft, _ = session.draft(session.prefill([Request(prompt, 8) for prompt in prompts]))
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


@pytest.mark.parametrize("way", ["chain", "tree"])
def test_caches_and_logs_are_never_copied(way):
    """Two rows in the compiled loop; a tree's own buffers are no cache."""
    drafter, target = engine().build_drafter(GenerationConfig(**WAYS[way])), engine().target
    plan = decoding.make_plan(drafter, platform="cpu")
    tokens, lengths = np.zeros((2, 9), np.int32), np.full(2, 9, np.int32)
    start = functools.partial(prefilled, target, drafter, plan, tokens, lengths, lengths, capacity=CAPACITY)
    state = jax.eval_shape(start)
    loop = jax.jit(lambda t, d, s: decoding.generate(t, d, s, plan=plan), donate_argnums=2)
    text = loop.lower(target, drafter, state).compile().as_text()
    kept = [leaf.shape for leaf in jax.tree.leaves((state.target, state.drafter.cache, state.log)) if leaf.ndim >= 3]
    assert len(kept) == (8 if way == "chain" else 10)
    shapes = {f"[{','.join(map(str, shape))}]" for shape in kept}
    copies = [line for line in text.splitlines() if re.search(r"= [^=]* copy(-start)?\(", line)]
    assert not [line for line in copies if any(shape in line.split(" copy")[0] for shape in shapes)]


def test_rounds_show_the_trees_of_either_method():
    """`eagle3`'s, and those of `failfast --tree-budget`; other rounds have no such key."""
    from tiny_engines import extended_engine

    branching = {"method": "failfast", "spec_len": 3, "max_spec_len": 3, "tree_budget": 7}
    for made, options in ((engine(), WAYS["tree"]), (extended_engine(), branching)):
        (result,) = made.generate([[3, 4, 5]], **options, max_new_tokens=12, ignore_eos=True)
        rounds = result.to_dict()["rounds"]
        for entry in rounds:
            assert set(entry["tree"]) == {"tokens", "parent"} and len(entry["tree"]["tokens"]) == options["tree_budget"]
            assert tuple(entry["drafted"][: entry["accepted"]]) in {(), *paths(**entry["tree"])}
    (result,) = engine().generate([[3, 4, 5]], **WAYS["chain"], max_new_tokens=12, ignore_eos=True)
    assert all("tree" not in entry for entry in result.to_dict()["rounds"])


def test_a_finite_pass_is_all_that_a_level_sees():
    """A tree's level, pass by pass, against each of its paths as a text of its own."""
    model = engine().drafter
    tree = engine().build_drafter(GenerationConfig(**WAYS["tree"]))
    session = engine().runtime.session(tree, batch=1, capacity=CAPACITY)
    state = session.prefill([Request([3, 4, 5, 6, 7], 8)])
    before = jax.device_get(state.drafter)
    draft, _ = session.draft(state)
    count = int(draft.length[0])

    @jax.jit
    def chain(model, cache, hidden, tokens):
        found = []
        for index in range(count):
            logits = jax.nn.softmax(model.network.logits_of(hidden), -1)
            found.append(logits[0, jnp.argmax(model.draft_ids == tokens[index])])
            start = jnp.asarray([4 + index])
            embedded = model.embed[tokens[index]][None, None]
            out, cache = model.network.pairs(embedded, hidden[:, None], cache, start, start[0] + 1)
            hidden = out[:, 0]
        return jnp.stack(found)

    expected = chain(model, before.cache, before.hidden, draft.tokens[0])
    np.testing.assert_allclose(draft.confidence[0, :count], expected, rtol=1e-4)


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
