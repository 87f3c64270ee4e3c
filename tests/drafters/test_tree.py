"""Token trees: each node is verified like the text of its path, and the longest agreeing path is found."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, random_model, tiny_config

from failfast_jax.decoding import token_tree as trees
from failfast_jax.decoding.decode_state import Tree


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths = [()]
    for token, parent in zip(tree.tokens[row, : tree.size[row]].tolist(), tree.parent[row].tolist()):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


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
