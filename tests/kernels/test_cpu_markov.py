"""The CPU's Markov pass over a block: against all sums, for every width of vectors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from failfast_jax.kernels import cpu_markov, llvm_emitter
from failfast_jax.models.markov_head import MarkovHead


def by_hand(logits, last, w1, w2, ids) -> np.ndarray:
    """All sums of all rows."""
    w1, w2 = (np.asarray(x).astype(np.float64) for x in (w1, w2))
    chosen = np.zeros(logits.shape[:2], np.int32)
    for block, token in enumerate(last):
        for row, x in enumerate(logits[block]):
            token = chosen[block, row] = ids[np.argmax(x + w2 @ w1[token])]
    return chosen


def spread(w2) -> tuple[np.ndarray, np.ndarray]:
    w2 = np.asarray(w2).astype(np.float32)
    return w2.mean(0), np.linalg.norm(w2 - w2.mean(0), axis=1) + 1e-4


@pytest.mark.parametrize("heat", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
def test_the_best_token_of_every_row(unit, dtypes, heat):
    """However much corrections weigh, and wherever the mean of all tokens' vectors lies."""
    rng = np.random.default_rng(0)
    for batch, rows, size, vocab, rank in [(1, 7, 300, 500, 32), (3, 2, 16, 16, 16), (2, 4, 49, 60, 48)]:
        logits = (heat * rng.standard_normal((batch, rows, size))).astype(np.float32)
        w1 = jnp.asarray(rng.standard_normal((vocab, rank)), dtypes[0])
        w2 = jnp.asarray(rng.standard_normal((size, rank)) + 3 * rng.standard_normal(rank), dtypes[1])
        ids = np.sort(rng.choice(vocab, size, replace=False)).astype(np.int32)
        last = rng.integers(0, vocab, batch).astype(np.int32)
        found = cpu_markov.choose(logits, last, w1, w2, *spread(w2), ids)
        np.testing.assert_array_equal(found, by_hand(logits, last, w1, w2, ids))
        if size == vocab:
            np.testing.assert_array_equal(cpu_markov.choose(logits, last, w1, w2, *spread(w2), None), found)


def test_the_lowest_id_on_ties_and_no_token_that_is_forbidden(unit):
    size, rank = 40, 16
    w1, w2 = np.zeros((size, rank), np.float32), np.zeros((size, rank), np.float32)
    logits = np.zeros((1, 4, size), np.float32)
    logits[0, 1, [30, 17, 33]] = 2
    logits[0, 2] = -np.inf
    logits[0, 2, 39] = -5
    logits[0, 3] = np.nan
    [[first, second, third, anything]] = cpu_markov.choose(logits, np.zeros(1, np.int32), w1, w2, *spread(w2), None)
    assert (first, second, third) == (0, 17, 39) and 0 <= anything < size


def test_ids_beside_the_vocabulary_are_not_read_beside_the_matrix(unit):
    w = np.ones((32, 16), np.float32)
    logits = np.arange(32, dtype=np.float32)[None, None]
    for last in (-(2**31), -1, 32, 2**31 - 1):
        assert cpu_markov.choose(logits, np.array([last], np.int32), w, w, *spread(w), None) == 31


def test_what_is_not_served(unit):
    good = {"rank": 32, "outputs": 40, "dtypes": ("float32", "float16")}
    assert cpu_markov.supports(**good) is None
    assert cpu_markov.supports(**good | {"rank": 6}) == f"rank 6: a multiple of {unit.lanes}"
    assert cpu_markov.supports(**good | {"outputs": 3}) == f"3 tokens: {unit.lanes} or more"
    assert cpu_markov.supports(**good | {"dtypes": ("float32", "int8")}) == "int8: float32, bfloat16 or float16"
    w = np.ones((20, 16), np.float32)
    with pytest.raises(ValueError, match="a Markov head of .*shapes and types that do not fit"):
        cpu_markov.choose(np.ones((1, 2, 20), np.float16), np.zeros(1, np.int32), w, w, *spread(w), None)


def test_heads_that_are_more_than_a_sum_go_row_by_row():
    sizes = {"vocab": 40, "drafted": 40, "size": 8, "rank": 16, "dtype": "float32", "rngs": nnx.Rngs(0)}
    served = llvm_emitter.vector_unit() is not None
    assert (MarkovHead("vanilla", **sizes).reach() is not None) == served
    assert MarkovHead("gated", **sizes).reach() is None and MarkovHead("rnn", **sizes).reach() is None
