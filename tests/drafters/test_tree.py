"""Token trees: which branches grow, that each is verified like a text of its own, and that the output is vanilla's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, fond_of, own_tokens, prefilled, random_model, sampling, tiny_config

from failfast_jax import FailFast, GenerationConfig, decoding
from failfast_jax.decoding import picking
from failfast_jax.decoding import token_tree as trees
from failfast_jax.decoding.decode_state import Alternatives, Draft, Tree
from failfast_jax.drafters.branch_tree import TreeDrafter, grow

# Growing.

LONGEST, RANKS = 4, 2


def random_draft(seed: int, batch: int = 20) -> Draft:
    rng = np.random.default_rng(seed)
    tokens = np.asarray([rng.permutation(VOCAB)[: LONGEST * (1 + RANKS)] for _ in range(batch)], np.int32)
    tokens = tokens.reshape(batch, LONGEST, 1 + RANKS)
    probability = np.sort(rng.dirichlet(np.full(1 + RANKS + 1, 0.6), (batch, LONGEST)))[..., ::-1].astype(np.float32)
    probability[0, 0] = [1, 0, 0, 0]
    return Draft(
        tokens=tokens[..., 0],
        confidence=probability[..., 0],
        length=rng.integers(1, LONGEST + 1, batch).astype(np.int32),
        passes=np.ones(batch, np.int32),
        alternatives=Alternatives(tokens=tokens[..., 1:], probability=probability[..., 1 : 1 + RANKS]),
    )


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths = [()]
    for token, parent in zip(tree.tokens[row, : tree.size[row]].tolist(), tree.parent[row].tolist()):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


def candidates(draft: Draft, row: int) -> dict[tuple[int, ...], float]:
    """Every path that may be a node, with its probability."""
    length = int(draft.length[row])
    own, confidence = draft.tokens[row].tolist(), draft.confidence[row].astype(float)
    nodes = {tuple(own[: end + 1]): 2.0 for end in range(length)}  # the draft itself always
    for fork in range(length):
        for rank in range(RANKS):
            other = int(draft.alternatives.tokens[row, fork, rank])
            worth = confidence[:fork].prod() * float(draft.alternatives.probability[row, fork, rank])
            for end in range(fork, length):
                path = (*own[:fork], other, *own[fork + 1 : end + 1])
                nodes[path] = worth * confidence[fork + 1 : end + 1].prod()
    return nodes


@pytest.mark.parametrize("budget", [LONGEST, 9, 40])
def test_the_most_probable_nodes_are_grown(budget):
    draft = random_draft(budget)
    tree = jax.device_get(jax.jit(grow, static_argnums=1)(draft, budget))
    assert tree.tokens.shape == tree.parent.shape == (20, budget)
    for row in range(20):
        worth, paths = candidates(draft, row), paths_of(tree, row)
        assert len(set(paths)) == len(paths) == min(budget, len(worth))
        best = sorted(worth.values(), reverse=True)[: len(paths)]
        np.testing.assert_allclose(sorted((worth[path] for path in paths), reverse=True), best, rtol=1e-4, atol=1e-8)


# Verifying: a random tree behind random text.

WIDTH, NODES, START = 16, 13, 9


@functools.cache
def target():
    return random_model(tiny_config(num_layers=2), seed=1)


def random_trees(seed: int, batch: int = 2) -> Tree:
    rng = np.random.default_rng(seed)
    parent = np.stack([[rng.integers(0, node + 1) for node in range(NODES)] for _ in range(batch)])
    return Tree(
        tokens=rng.integers(0, VOCAB, (batch, NODES)).astype(np.int32),
        parent=parent.astype(np.int32),
        confidence=rng.random((batch, NODES), np.float32),
        size=np.asarray([NODES, NODES - 3], np.int32),
    )


@jax.jit
def verified(model, text, tree, mask, slots):
    """Logits of the window's slots, and the cache after one path was kept."""
    batch = text.shape[0]
    start = jnp.full((batch,), START)
    cache = model.init_cache(batch, 128)
    _, cache, _ = model.window(text[:, :START], cache, jnp.zeros_like(start), jnp.int32(START))
    tokens = trees.window_of(text[:, START, None], tree.tokens, WIDTH)
    hidden, cache, _ = model.window(tokens, cache, start, jnp.int32(START + WIDTH), (), mask)
    return model.logits_of(hidden), model.keep(cache, start, slots, WIDTH)


@jax.jit
def cached(model, text):
    cache = model.init_cache(text.shape[0], 128)
    return model.window(text, cache, jnp.zeros(text.shape[0], jnp.int32), jnp.int32(text.shape[1]))[1]


@pytest.mark.parametrize("seed", range(3))
def test_every_node_is_scored_like_its_path(seed):
    """Its logits, and the kept path's keys and values, are those of its path as plain text."""
    model, tree = target(), random_trees(seed)
    text = np.random.default_rng(seed).integers(0, VOCAB, (2, START + 1)).astype(np.int32)
    mask = jax.device_get(trees.mask_of(tree, WIDTH))
    paths = [paths_of(tree, row) for row in range(2)]
    deepest = [int(np.argmax([len(path) for path in row])) for row in paths]
    slots = np.zeros((2, WIDTH), np.int32)
    for row, node in enumerate(deepest):
        line = np.flatnonzero(mask.visible[row, node + 1])
        slots[row, : len(line)] = line
    logits, kept = jax.device_get(verified(model, text, tree, mask, slots))
    longest = START + 1 + NODES
    for row in range(2):
        texts = np.zeros((len(paths[row]), longest), np.int32)
        for node, path in enumerate(paths[row]):
            assert mask.depth[row, node + 1] == len(path)
            texts[node, : START + 1 + len(path)] = [*text[row], *path]
        plain = np.asarray(model.logits(texts))
        expected = [plain[node, START + len(path)] for node, path in enumerate(paths[row])]
        np.testing.assert_allclose(logits[row, 1 : len(expected) + 1], expected, atol=1e-3)
        caches = jax.device_get(cached(model, texts[deepest[row] : deepest[row] + 1]))
        end = START + 1 + len(paths[row][deepest[row]])
        for mine, its in zip((*kept.k, *kept.v), (*caches.k, *caches.v)):
            np.testing.assert_allclose(mine[row, :, :end], its[0, :, :end], atol=1e-4)


def test_the_longest_agreeing_path():
    rng = np.random.default_rng(0)
    run = jax.jit(lambda tree, tokens, picks: trees.longest_path(tree, trees.mask_of(tree, WIDTH), tokens, picks))
    lengths = set()
    for seed in range(30):
        tree = random_trees(seed).replace(tokens=rng.integers(0, 3, (2, NODES)).astype(np.int32))
        picks = rng.integers(0, 3, (2, WIDTH)).astype(np.int32)
        tokens = trees.window_of(np.zeros((2, 1), np.int32), tree.tokens, WIDTH)
        accepted, slots = jax.device_get(run(tree, tokens, picks))
        for row in range(2):
            agreeing = {0: [0]}
            for node in range(int(tree.size[row])):
                parent = int(tree.parent[row, node])
                if parent in agreeing and tree.tokens[row, node] == picks[row, parent]:
                    agreeing[node + 1] = [*agreeing[parent], node + 1]
            longest = max(map(len, agreeing.values()))
            assert accepted[row] == longest - 1
            assert slots[row, :longest].tolist() in [path for path in agreeing.values() if len(path) == longest]
            lengths.add(longest)
    assert lengths >= {1, 2, 3, 4}


# Whole answers.

CAPACITY, NEW = 128, 60


@functools.cache
def pair() -> FailFast:
    """Two tokens are the favourites of both; what is second for one model is often first for the other."""
    target = fond_of(random_model(tiny_config(num_layers=1), seed=1, gain=2.0), {7: 2.0, 11: 1.9})
    return FailFast(target, fond_of(random_model(diffusion_config(), seed=2, gain=2.0), {7: 3.2, 11: 3.0}))


@jax.jit
def answer(target, drafter, tokens, lengths, options):
    """Texts, their lengths, and for every round how long a path and how much of the draft alone were accepted."""
    plan = decoding.Plan((32,), (32,), (32,))
    limits = jnp.full_like(lengths, NEW)
    state = prefilled(target, drafter, plan, tokens, lengths, limits, sampling=options, capacity=CAPACITY)

    def body(carry):
        state, gained = carry
        proposal, state = decoding.draft(drafter, state)
        verified, state = decoding.verify(target, drafter, state, proposal, plan=plan)
        alone = picking.agreeing_prefix(proposal.tokens, proposal.length, verified.picks)
        gain = jnp.where(state.running, verified.accepted - alone, 0)
        return decoding.commit(drafter, state, proposal, verified), gained + (gain > 0).sum()

    return jax.lax.while_loop(lambda carry: jnp.any(carry[0].running), body, (state, jnp.int32(0)))


def test_the_text_is_the_targets_own():
    """Rows with their own temperatures and seeds; every token is the one that the target picks behind those before."""
    drafter = pair().build_drafter(GenerationConfig("failfast", spec_len=3, max_spec_len=9, tau=0.3, tree_budget=31))
    assert isinstance(drafter, TreeDrafter) and drafter.budget == 31
    rng = np.random.default_rng(0)
    temperatures = np.asarray([0, 0.7, 0.7, 0.7, 1.0, 1.2, 1.2, 1.2], np.float32)
    rows = len(temperatures)
    filters = {"top_k": np.asarray([0, 0, 5, 0, 0, 0, 9, 0]), "top_p": np.asarray([1, 1, 1, 0.8, 1, 1, 0.95, 1])}
    options = sampling(rows, temperatures, **filters, seed=np.arange(rows))
    lengths = rng.integers(1, 30, rows).astype(np.int32)
    tokens = rng.integers(0, VOCAB - 1, (rows, 30)).astype(np.int32)
    state, gained = jax.device_get(answer(pair().target, drafter, tokens, lengths, options))
    assert (state.length == lengths + NEW).all()
    own = np.asarray(own_tokens(pair().target, state.tokens[:, :CAPACITY], options))
    for row, (begin, end) in enumerate(zip(lengths, state.length)):
        assert state.tokens[row, begin:end].tolist() == own[row, begin - 1 : end - 1].tolist(), row
    # What that rests on: branches were taken, whole drafts too, and the log shows the path that was.
    assert gained > 10
    log = state.log
    assert log.accepted.max() == 9
    for row in range(rows):
        at = lengths[row]
        for index in range(log.rounds[row]):
            emitted, kept = log.emitted[row, index], min(log.accepted[row, index], log.emitted[row, index])
            assert log.drafted[row, index, :kept].tolist() == state.tokens[row, at : at + kept].tolist()
            at += emitted


def test_the_deepest_path_is_the_first_of_the_longest():
    rng = np.random.default_rng(0)
    nodes = 7
    tree = Tree(
        tokens=rng.integers(0, 3, (20, nodes)).astype(np.int32),
        parent=np.asarray([[rng.integers(0, node + 1) for node in range(nodes)] for _ in range(20)], np.int32),
        confidence=rng.uniform(0.05, 0.95, (20, nodes)).astype(np.float32),
        size=rng.integers(0, nodes + 1, 20).astype(np.int32),
    )
    tokens, _, length = jax.device_get(jax.jit(functools.partial(trees.deepest, longest=5))(tree))
    for row in range(20):
        longest = max(paths_of(tree, row), key=len, default=())
        assert int(length[row]) == len(longest) and tuple(tokens[row, : length[row]].tolist()) == longest[:5]
