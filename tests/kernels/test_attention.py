"""Attention over the cache: kernels of a CPU against a softmax in float64, and bit for bit against themselves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import attention_by_hand

from failfast_jax.kernels import cpu_attention, cpu_kernels, kernel_table, plain_attention
from failfast_jax.kernels.attention_window import TILE, AttentionCase, Window
from failfast_jax.kernels.plain_attention import write_window
from failfast_jax.models.kv_cache import round_up

CAPACITY = 384


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays(seed: int, batch: int, width: int, heads: int, kv_heads: int, capacity: int = CAPACITY, head_dim: int = 8):
    """Rotated queries, and both caches."""
    cache = (batch, kv_heads, capacity, head_dim)
    return normal(seed, batch, width, heads, head_dim), normal(seed + 1, *cache), normal(seed + 2, *cache)


@functools.partial(jax.jit, static_argnames=("block_size", "back", "kernel"))
def attend(q, k, v, start, live, block_size=1, until=None, back=None, kernel="reference"):
    window = Window(None, None, start, live, until=until, back=back, block_size=block_size)
    return kernel_table.attend_written(q, (k, v), window, kernel=kernel)


both_kernels = pytest.mark.parametrize("kernel", ["reference", "cpu"])
# Few shapes, so that few programs are compiled; what varies freely is not static.
SHAPES = [(1, 1, 4, 4), (2, 5, 4, 2), (1, 16, 6, 2), (3, 4, 3, 1)]
cases = given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 99),
    starts=st.lists(st.integers(0, CAPACITY - 32), min_size=3, max_size=3),
    block_size=st.sampled_from([1, 8, 32]),
)


def attention_case(shape, seed, starts, block_size):
    batch, width, heads, kv_heads = shape
    q, k, v = arrays(seed, batch, width, heads, kv_heads)
    start = np.asarray(starts[:batch], np.int32)
    live = int(start.max() + width - 1) // block_size * block_size + block_size
    return q, k, v, start, np.int32(live)


@both_kernels
@settings(max_examples=40)
@cases
def test_equals_dense_attention(kernel, shape, seed, starts, block_size):
    q, k, v, start, live = attention_case(shape, seed, starts, block_size)
    expected = attention_by_hand(q, k, v, start, block_size)
    np.testing.assert_allclose(attend(q, k, v, start, live, block_size, kernel=kernel), expected, atol=2e-5)


@both_kernels
@settings(max_examples=10)
@given(seed=st.integers(0, 99), start=st.integers(0, 300), back=st.sampled_from([1, 3, 40, 129]), whole=st.booleans())
def test_a_sliding_window_sees_its_last_positions(kernel, seed, start, back, whole):
    """Causal rows, or rows that see their whole block, as drafters of either publisher have them."""
    q, k, v = arrays(seed, 1, 8, 4, 2)
    starts, until = np.asarray([start], np.int32), np.asarray([start + 5 if whole else 0], np.int32)
    output = attend(q, k, v, starts, np.int32(start + 8), 1, until, back, kernel)
    np.testing.assert_allclose(output, attention_by_hand(q, k, v, starts, 1, until, back), atol=2e-5)


@both_kernels
@settings(max_examples=15)
@cases
def test_dead_slots_do_not_matter(kernel, shape, seed, starts, block_size):
    q, k, v, start, live = attention_case(shape, seed, starts, block_size)
    expected = np.asarray(attend(q, k, v, start, live, block_size, kernel=kernel))
    k[:, :, live:] = v[:, :, live:] = 1e4
    for longer in (live, live + 1, round_up(int(live), TILE) + TILE, CAPACITY + 7):
        output = attend(q, k, v, start, np.int32(longer), block_size, kernel=kernel)
        np.testing.assert_array_equal(output, expected)


@both_kernels
@settings(max_examples=10)
@given(seed=st.integers(0, 99), row=st.integers(8, CAPACITY - 9), block_size=st.sampled_from([1, 8]))
def test_a_row_does_not_depend_on_where_its_window_begins(kernel, seed, row, block_size):
    width = 8
    q, k, v = arrays(seed, 1, CAPACITY, 4, 2)
    results = []
    for start in range(row - width + 1, row + 1):
        live = np.int32(min(start + width + block_size, CAPACITY))
        output = attend(
            q[:, start : start + width], k, v, np.asarray([start], np.int32), live, block_size, kernel=kernel
        )
        results.append(np.asarray(output)[0, row - start])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@both_kernels
@pytest.mark.parametrize("width", [4, 130])
def test_a_pass_nobody_listens_to_has_finite_results(kernel, width):
    q, k, v = arrays(0, 2, width, 4, 2, head_dim=32)
    assert np.isfinite(attend(q, k, v, np.asarray([200, 0], np.int32), np.int32(0), kernel=kernel)).all()


@both_kernels
@pytest.mark.parametrize("width", [2, 130])
def test_large_scores_and_far_ones(kernel, width):
    """Weights that are one, and weights that vanish: no infinity, no NaN."""
    q, k, v = arrays(1, 1, width, 2, 1, head_dim=32)
    k, start = k * 100, np.asarray([250], np.int32)
    output = attend(q, k, v, start, np.int32(250 + width), kernel=kernel)
    np.testing.assert_allclose(output, attention_by_hand(q, k, v, start, 1), atol=5e-4)


PROMPTS = {
    "from the beginning": {"width": 300, "start": [0, 0]},
    "after others": {"width": 129, "start": [700, 31]},
    "one position more than whole pieces": {"width": 257, "start": [255, 256]},
    "block-causal": {"width": 160, "start": [96, 320], "block_size": 32},
    "up to a position of its own": {"width": 140, "start": [3, 500], "until": [100, 630]},
    "a sliding window": {"width": 200, "start": [0, 600], "back": 70},
    "a sliding window as short as a step": {"width": 130, "start": [300, 512], "back": 1},
    "seven query heads a KV head": {"width": 131, "start": [9, 400], "heads": 14},
    "up to the end of one and a half chunks": {"width": 256, "start": [128, 100], "capacity": 384},
}


def assert_prompt_is_right(width, start, head_dim=32, heads=6, capacity=1024, block_size=1, until=None, back=None):
    q, k, v = arrays(1, 2, width, heads, 2, capacity, head_dim)
    start, until = np.asarray(start, np.int32), None if until is None else np.asarray(until, np.int32)
    output = attend(q, k, v, start, np.int32(max(start) + width), block_size, until, back, "cpu")
    expected = attention_by_hand(q, k, v, start, block_size, 0 if until is None else until, back)
    np.testing.assert_allclose(output, expected, atol=2e-5)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_attend_as_float64_has_it(name):
    assert_prompt_is_right(**PROMPTS[name])


@pytest.mark.parametrize("head_dim", [32, 96])
def test_prompts_for_every_processor_and_heads_of_several_panels(lanes, head_dim):
    assert_prompt_is_right(**PROMPTS["after others"], head_dim=head_dim)


@pytest.mark.parametrize("head_dim, dtype", [(12, "float32"), (64, "bfloat16"), (96, "float16")])
def test_several_chunks_for_every_processor(lanes, head_dim, dtype):
    q, *cache = arrays(1, 2, 5, 6, 2, 640, head_dim)
    k, v = (jnp.asarray(layer).astype(dtype) for layer in cache)
    start = np.asarray([600, 30], np.int32)
    wide = (np.asarray(layer.astype(jnp.float32)) for layer in (k, v))
    output = attend(q, k, v, start, np.int32(605), kernel="cpu")
    np.testing.assert_allclose(output, attention_by_hand(q, *wide, start, 1), atol=2e-5)


def test_what_would_be_read_beside_an_array_is_refused():
    window, k = Window(None, None, jnp.asarray([5]), jnp.int32(7)), jnp.ones((1, 1, 256, 16))
    with pytest.raises(ValueError, match="keys and values of one shape and type"):
        cpu_attention.attend(jnp.ones((1, 2, 2, 16)), (k, k.astype(jnp.bfloat16)), window)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"capacity": 100}, "a multiple of 16"),
        ({"dtype": "int8"}, "int8"),
        ({"pattern": "tree"}, "a tree"),
    ],
)
def test_shapes_that_are_not_served(change, message):
    case = {"capacity": 256, "head_dim": 64, "dtype": "float32", "width": 128}
    assert cpu_attention.refuses(AttentionCase(**case)) in (None, cpu_kernels.NO_UNIT)
    assert message in cpu_attention.refuses(AttentionCase(**case | change))


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("length", [None, 21])
def test_whole_sequences_without_a_cache(block_size, length):
    q, k, v = arrays(3, 2, 24, 4, 2, capacity=24)
    whole = (jnp.asarray(x) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2)))
    output = plain_attention.dense_attention(*whole, block_size=block_size, length=length)
    end = length or 24
    expected = attention_by_hand(q, k[:, :, :end], v[:, :, :end], np.zeros(2), block_size)
    np.testing.assert_allclose(output[:, :end], expected[:, :end], atol=2e-5)


def test_padding_that_is_not_finite_spoils_no_whole_sequence():
    q, k, v = (jnp.asarray(x) for x in arrays(3, 2, 24, 4, 2, capacity=24))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    run = functools.partial(plain_attention.dense_attention, block_size=8, length=21)
    np.testing.assert_array_equal(run(q, k, v.at[:, 22].set(jnp.inf))[:, :21], run(q, k, v)[:, :21])


def kinds_of_windows(width: int, start):
    """Masks: causal, blocks, the last positions, a tree's branch, and groups that see three slots of theirs."""
    below = np.broadcast_to(np.tril(np.ones((width, width), bool)), (len(start), width, width))
    group = start[:, None] + np.arange(0, width, 4)
    groups = np.stack([start[:, None] + 0 * group] * 3 + [group, group + 3], 2).astype(np.int32)
    return {
        "causal": {},
        "blocks": {"block_size": 4},
        "sliding": {"back": 3},
        "tree": {"visible": jnp.asarray(below)},
        "groups": {"seen": jnp.asarray(groups)},
    }


@pytest.mark.parametrize("kernel", ["reference", "cpu", "xla"])
@pytest.mark.parametrize(
    "kind, width, dtype",
    [
        *(("causal", 8, dtype) for dtype in ("float32", "float16")),
        ("sliding", 8, "float16"),
        ("tree", 8, "float32"),
        ("blocks", 8, "bfloat16"),
        ("groups", 8, "float16"),
        ("causal", 136, "float32"),
        ("sliding", 136, "float32"),
    ],
)
def test_what_is_not_finite_spoils_only_rows_that_see_it(kernel, kind, width, dtype):
    """A key or a value of a window's row 5, which the next pass writes over."""
    batch, head_dim = 2, 32
    dtype = "float32" if kernel == "xla" else dtype  # on CPU XLA has no other
    start, at = np.asarray([8, 200], np.int32), np.arange(width)
    sees = at >= 5
    sees &= at < 8 if kind == "sliding" else True
    sees = at // 4 == 1 if kind == "groups" else at >= 4 if kind == "blocks" else sees
    qkv = normal(0, batch, width, 2, 4, head_dim)
    cos = np.ones((batch, width, 1, head_dim // 2), np.float32)
    window = Window(cos, 0 * cos, start, np.int32(start.max() + width), **kinds_of_windows(width, start)[kind])
    cache = tuple(jnp.asarray(normal(seed, batch, 2, CAPACITY, head_dim), dtype) for seed in (1, 2))
    run = jax.jit(functools.partial(kernel_table.attend, kernel=kernel))
    healthy, _ = run(jnp.asarray(qkv, dtype), cache, window)
    for member, number in ((3, np.inf), (3, -np.inf), (3, np.nan), (2, np.nan)):
        bad = qkv.copy()
        bad[:, 5, :, member, 7] = number
        output, spoilt = run(jnp.asarray(bad, dtype), cache, window)
        output = np.asarray(output, np.float32)
        assert np.isnan(output[:, sees]).all(), (kind, number)
        np.testing.assert_array_equal(output[:, ~sees], np.asarray(healthy, np.float32)[:, ~sees])
        again, _ = run(jnp.asarray(qkv, dtype), spoilt, window)
        np.testing.assert_array_equal(again, healthy)


def test_write_window_writes_each_row_at_its_place():
    cache = jnp.zeros((2, 1, TILE, 8))
    window = jnp.ones((2, 3, 1, 8)) * jnp.asarray([1.0, 2.0])[:, None, None, None]
    written = np.asarray(write_window(cache, window, jnp.asarray([5, 100])))
    expected = np.zeros(cache.shape, np.float32)
    expected[0, :, 5:8], expected[1, :, 100:103] = 1, 2
    np.testing.assert_array_equal(written, expected)
