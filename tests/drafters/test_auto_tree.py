"""`auto` with trees: the nodes that are verified, what is learned of them, and that no token changes."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from test_eagle3 import TREE, answers, engine, paths
from tiny_models import VOCAB

from failfast_jax.decoding.decode_state import Tree
from failfast_jax.decoding.token_tree import best_part, deepest, path_chances, trials
from failfast_jax.decoding.width_plan import Widths
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.policy import cost_book
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.auto_tree import AutoTree
from failfast_jax.policy.expected_tokens import MODEL_CHANCES, Calibration, Costs
from failfast_jax.runtime.model_runtime import Request

NODES = 7
PROMPTS = [[3, 4, 5] * 4, [9] * 8, [20]]


def random_tree(seed: int, batch: int = 4) -> Tree:
    """Random parents, confidences and sizes; tokens of three kinds, so that some paths are right."""
    rng = np.random.default_rng(seed)
    parent = np.stack([[rng.integers(0, node + 1) for node in range(NODES)] for _ in range(batch)])
    return Tree(
        tokens=jnp.asarray(rng.integers(0, 3, (batch, NODES)), jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        confidence=jnp.asarray(rng.uniform(0.05, 0.95, (batch, NODES)), jnp.float32),
        size=jnp.asarray(rng.integers(0, NODES + 1, batch), jnp.int32),
    )


def ancestry(tree: Tree, row: int) -> list[list[int]]:
    """The nodes from the root to each node, itself included."""
    lines: list[list[int]] = []
    for node in range(int(tree.size[row])):
        parent = int(tree.parent[row, node])
        lines.append([*(lines[parent - 1] if parent else []), node])
    return lines


@pytest.mark.parametrize("seed", range(6))
def test_the_best_part_is_that_of_all_parts(seed):
    tree = random_tree(seed)
    value = jax.jit(path_chances)(tree, tree.confidence)
    for row in range(4):
        lines, sure = ancestry(tree, row), np.asarray(tree.confidence[row], float)
        worth = [sure[line].prod() for line in lines]
        np.testing.assert_allclose(value[row], [*worth, *[0.0] * (NODES - len(worth))], rtol=1e-5)
        for most in range(NODES + 1):
            whole = [
                part
                for part in itertools.combinations(range(len(lines)), min(most, len(lines)))
                if all(set(lines[node]) <= set(part) for node in part)
            ]
            best = max(sum(worth[node] for node in part) for part in whole)
            part = jax.device_get(jax.jit(best_part)(tree, value, jnp.full(4, most)))
            size = int(part.size[row])
            assert size == min(most, len(lines))
            left = jax.jit(path_chances)(part, part.confidence)[row]
            assert float(left.sum()) == pytest.approx(best, rel=1e-5)
            # What stays are paths of the tree, with their tokens.
            tokens = tree.tokens[row].tolist()
            before = sorted(tuple(tokens[node] for node in line) for line in lines)
            found = paths(part.tokens[row, :size].tolist(), (part.parent[row, :size] - 1).tolist())
            assert not [path for path in found if path not in before]


@pytest.mark.parametrize("seed", range(6))
def test_the_deepest_path_and_the_trials_of_nodes(seed):
    tree, rng = random_tree(seed), np.random.default_rng(seed + 100)
    text, count = rng.integers(0, 3, (4, 5)).astype(np.int32), rng.integers(0, 6, 4).astype(np.int32)
    tokens, confidence, length = jax.jit(functools.partial(deepest, longest=5))(tree)
    tried, right = jax.jit(trials)(tree, text, count)
    for row in range(4):
        lines = ancestry(tree, row)
        deep = max(lines, key=len, default=[])
        assert int(length[row]) == len(deep)
        assert tokens[row, : len(deep[:5])].tolist() == tree.tokens[row, jnp.asarray(deep[:5], int)].tolist()
        np.testing.assert_array_equal(
            confidence[row], [*tree.confidence[row, jnp.asarray(deep[:5], int)], *[0.0] * (5 - len(deep[:5]))]
        )
        ids = tree.tokens[row].tolist()
        agrees = [[ids[node] for node in line] == text[row, : len(line)].tolist() for line in lines]
        inside = [len(line) <= count[row] for line in lines]
        on_trial = [inside[n] and (len(line) == 1 or agrees[line[-2]]) for n, line in enumerate(lines)]
        spare = [False] * (NODES - len(lines))
        assert tried[row].tolist() == on_trial + spare
        assert right[row].tolist() == [a and t for a, t in zip(agrees, on_trial)] + spare


@contextlib.contextmanager
def priced(verify: dict[int, float], draft: float):
    """Costs of every session: seconds by rows, and of a pass."""

    def measure(session):
        widths = session.plan.widths
        table = np.interp(widths, *zip(*verify.items())).astype(np.float32)
        return Costs(table, np.float32(draft), np.int32(0), np.int32(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_book, "measure", measure)
        engine().runtime.costs.forget()
        yield
    engine().runtime.costs.forget()


CHEAP = ({1: 1.0, 16: 1.3}, 0.01)
DEAR = ({1: 1.0, 4: 6.0, 16: 9.0}, 2.0)


@pytest.mark.long
@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("way", [TREE, {"max_spec_len": 6}], ids=["tree", "chain"])
@settings(max_examples=8)
@given(data=st.data())
def test_the_text_is_vanillas(costs, way, data):
    prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
    prompts = data.draw(st.sampled_from([1, 3]).flatmap(lambda n: st.lists(prompt, min_size=n, max_size=n)))
    options = {
        "max_new_tokens": data.draw(st.sampled_from([1, 20, 80])),
        "temperature": data.draw(st.sampled_from([0.0, 0.9])),
        "seed": data.draw(st.integers(0, 3)),
    }
    stop = data.draw(st.none() | st.integers(0, VOCAB - 1))
    expected = answers(prompts, stop, method="vanilla", **options)
    with priced(*costs):
        drafted = answers(prompts, stop, method="auto", **way, **options)
    for one, other in zip(expected, drafted):
        assert (other.output_ids, other.finish_reason) == (one.output_ids, one.finish_reason)


def test_where_rows_are_cheap_trees_are_verified_and_rounds_are_repeatable():
    options = {"method": "auto", **TREE, "max_new_tokens": 60, "temperature": 0.7}
    with priced(*CHEAP):
        results, again = answers(PROMPTS, None, **options), answers(PROMPTS, None, **options)
    expected = answers(PROMPTS, None, method="vanilla", max_new_tokens=60, temperature=0.7)
    assert [one.output_ids for one in results] == [one.output_ids for one in expected]
    rounds = [entry for result in results for entry in result.rounds]
    sizes = [len(entry.tree["tokens"]) for entry in rounds if entry.tree]
    assert sizes and max(sizes) <= 15
    assert sum(entry.accepted for entry in rounds) > 0
    for entry in rounds:
        assert entry.expected >= 1 and entry.seconds > 0
        assert (entry.tree is None) == (entry.drafted == [])
        if entry.tree:
            assert tuple(entry.drafted[: entry.accepted]) in {(), *paths(**entry.tree)}
    assert [one.rounds for one in again] == [one.rounds for one in results]


@pytest.mark.parametrize("way, drafts", [(TREE, False), ({"max_spec_len": 6}, True)], ids=["tree", "chain"])
def test_what_a_whole_tree_costs_decides(way, drafts):
    """One pass is within a third of the first credit of two steps, the four of a tree are not."""
    with priced({1: 1.0, 16: 1.001}, 0.2):
        (result,) = answers(PROMPTS[:1], None, method="auto", **way, max_new_tokens=12)
    assert any(entry.passes for entry in result.rounds) == drafts


def test_where_rows_are_dear_no_tree_is_drafted():
    with priced(*DEAR):
        (result,) = answers(PROMPTS[:1], None, method="auto", **TREE, max_new_tokens=60)
    assert sum(entry.passes for entry in result.rounds) == 0 and len(result.rounds) == 60


def test_trees_are_verified_in_the_narrowest_width(monkeypatch):
    """Where a fifth row costs much, trees have three nodes, fewer than their longest path could have; rows differ."""
    monkeypatch.setattr(engine().runtime, "widths", Widths(verify=(1, 4, 8, 16), prefill=(32, 128)))
    options = {"method": "auto", **TREE, "max_new_tokens": 50}
    with priced({1: 1.0, 4: 1.01, 8: 3.0, 16: 3.1}, 0.001):
        results = answers(PROMPTS[:2], None, **options)
    expected = answers(PROMPTS[:2], None, method="vanilla", max_new_tokens=50)
    assert [one.output_ids for one in results] == [one.output_ids for one in expected]
    sizes = [{len(entry.tree["tokens"]) for entry in result.rounds if entry.tree} for result in results]
    assert all(found and max(found) <= 3 for found in sizes)
    assert sum(entry.accepted for result in results for entry in result.rounds) > 0


def test_rounds_are_made_as_costs_are_measured():
    drafter = engine().build_drafter(GenerationConfig("auto", **TREE))
    session = engine().runtime.session(drafter, capacity=60)
    for rows, ask in [*((width, -1) for width in session.plan.widths), (1, 1)]:
        flat = Costs.flat(len(session.plan.widths)).replace(rows=np.int32(rows), ask=np.int32(ask))
        timed = session.with_costs(flat)
        (log,) = timed.rounds(timed.advance(timed.start([Request([3, 4, 5], 40)]), 3))
        sizes = [0 if entry.tree is None else len(entry.tree["tokens"]) for entry in log.rounds]
        assert sizes == [min(rows - 1, 15)] * 3
        assert [entry.passes for entry in log.rounds] == [4 * int(ask > 0)] * 3


def test_chances_of_nodes_become_what_is_seen():
    """Two children and a grandchild, of confidences in three bins, that are right half, 3 and 7 tenths of the time."""
    tree = Tree(
        tokens=jnp.asarray([[1, 2, 3]]),
        parent=jnp.asarray([[0, 0, 1]]),
        confidence=jnp.asarray([[0.6, 0.2, 0.8]]),
        size=jnp.asarray([3]),
    )
    rng = np.random.default_rng(0)
    first = rng.choice([1, 2, 0], 400, p=[0.5, 0.3, 0.2])
    texts = np.stack([first, np.where(rng.random(400) < 0.7, 3, 0)], axis=1).astype(np.int32)

    def learn(chances: Calibration, text: Array) -> tuple[Calibration, None]:
        tried, right = trials(tree, text[None], jnp.asarray([2]))
        return chances.counted(tree.confidence, tried, right), None

    learned, _ = jax.lax.scan(learn, Calibration.of(1, MODEL_CHANCES), texts)
    np.testing.assert_allclose(learned.chance(tree.confidence)[0], [0.5, 0.3, 0.7], atol=0.1)


def test_trees_by_costs_are_a_drafter_of_trees():
    drafter = engine().build_drafter(GenerationConfig("auto", **TREE))
    assert isinstance(drafter, AutoTree) and drafter.shape.tree and drafter.max_draft == 15


def test_chains_end_where_another_pass_does_not_pay():
    drafter = engine().build_drafter(GenerationConfig("auto", max_spec_len=6))
    assert type(drafter) is Auto and (drafter.model.spec_len, drafter.model.max_spec_len) == (1, 6)
    with priced({1: 1.0, 16: 1.1}, 0.1):
        results = answers(PROMPTS, None, method="auto", max_spec_len=6, max_new_tokens=60)
    passes = {entry.passes for result in results for entry in result.rounds}
    assert len(passes - {0}) >= 2 and max(passes) <= 6
