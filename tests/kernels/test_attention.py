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

from failfast_jax.kernels import cpu_attention, kernel_table, plain_attention
from failfast_jax.kernels.attention_window import TILE, Window
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


every_kernel = pytest.mark.parametrize("kernel", ["reference", "cpu", "xla"])
both_kernels = pytest.mark.parametrize("kernel", ["reference", "cpu"])
# Few shapes, so that few programs are compiled; what varies freely is not static.
SHAPES = [(1, 1, 4, 4), (2, 5, 4, 2), (1, 16, 6, 2), (3, 4, 3, 1)]


@every_kernel
@settings(max_examples=25)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 99),
    starts=st.lists(st.integers(0, CAPACITY - 32), min_size=3, max_size=3),
    block_size=st.sampled_from([1, 8, 32]),
)
def test_equals_dense_attention_and_dead_slots_do_not_matter(kernel, shape, seed, starts, block_size):
    batch, width, heads, kv_heads = shape
    q, k, v = arrays(seed, batch, width, heads, kv_heads)
    start = np.asarray(starts[:batch], np.int32)
    live = (int(start.max()) + width - 1) // block_size * block_size + block_size
    output = np.asarray(attend(q, k, v, start, np.int32(live), block_size, kernel=kernel))
    np.testing.assert_allclose(output, attention_by_hand(q, k, v, start, block_size), atol=2e-5)
    k[:, :, live:] = v[:, :, live:] = 1e4
    for longer in (live, live + 1, round_up(live, TILE) + TILE, CAPACITY + 7):
        again = attend(q, k, v, start, np.int32(longer), block_size, kernel=kernel)
        np.testing.assert_array_equal(again, output)


@every_kernel
@settings(max_examples=10)
@given(seed=st.integers(0, 99), start=st.integers(0, 300), back=st.sampled_from([1, 3, 40, 129]), whole=st.booleans())
def test_a_sliding_window_sees_its_last_positions(kernel, seed, start, back, whole):
    """Causal rows, or rows that see their whole block, as drafters of either publisher have them."""
    q, k, v = arrays(seed, 1, 8, 4, 2)
    starts, until = np.asarray([start], np.int32), np.asarray([start + 5 if whole else 0], np.int32)
    output = attend(q, k, v, starts, np.int32(start + 8), 1, until, back, kernel)
    np.testing.assert_allclose(output, attention_by_hand(q, k, v, starts, 1, until, back), atol=2e-5)


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
def test_large_scores_and_a_pass_nobody_listens_to(kernel, width):
    """Weights that are one, weights that vanish, and no live slot: no infinity, no NaN."""
    q, k, v = arrays(1, 1, width, 2, 1, head_dim=32)
    k, start = k * 100, np.asarray([250], np.int32)
    output = attend(q, k, v, start, np.int32(250 + width), kernel=kernel)
    np.testing.assert_allclose(output, attention_by_hand(q, k, v, start, 1), atol=5e-4)
    assert np.isfinite(attend(q, k, v, start, np.int32(0), kernel=kernel)).all()


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


def kinds_of_windows(width: int, start):
    """Masks: causal, blocks, the last positions, a tree, and groups that see three stretches of slots."""
    tree = np.eye(width, dtype=bool)
    for node in range(1, width):
        tree[node] |= tree[(node - 1) // 2]
    group = start[:, None] + np.arange(0, width, 4)
    text = start[:, None] + 0 * group
    groups = np.stack([text - 4, text - 2, text, group, group + 3], 2).astype(np.int32)
    return {
        "causal": {},
        "blocks": {"block_size": 4},
        "sliding": {"back": 3},
        "tree": {"visible": jnp.asarray(np.stack([tree] * len(start)))},
        "groups": {"seen": jnp.asarray(groups)},
    }


@every_kernel
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
    """A key or a value of a window's row 5, which the next pass writes over; else every kernel is the reference."""
    batch, head_dim = 2, 32
    dtype = "float32" if kernel == "xla" else dtype  # on CPU XLA has no other
    start = np.asarray([8, 200], np.int32)
    qkv = normal(0, batch, width, 2, 4, head_dim)
    cos = np.ones((batch, width, 1, head_dim // 2), np.float32)
    window = Window(cos, 0 * cos, start, np.int32(start.max() + width), **kinds_of_windows(width, start)[kind])
    sees = np.asarray(window.mask(width, jnp.asarray([start[0] + 5])))[0, :, 0]
    cache = tuple(jnp.asarray(normal(seed, batch, 2, CAPACITY, head_dim), dtype) for seed in (1, 2))
    run = jax.jit(functools.partial(kernel_table.attend, kernel=kernel))
    healthy, _ = run(jnp.asarray(qkv, dtype), cache, window)
    expected, _ = kernel_table.attend(jnp.asarray(qkv, dtype), cache, window)
    healthy, expected = (np.asarray(out, np.float32) for out in (healthy, expected))
    np.testing.assert_allclose(healthy, expected, atol=1e-5 if dtype == "float32" else 2e-2)
    for member, number in ((3, np.inf), (3, -np.inf), (3, np.nan), (2, np.nan)):
        bad = qkv.copy()
        bad[:, 5, :, member, 7] = number
        output, spoilt = run(jnp.asarray(bad, dtype), cache, window)
        output = np.asarray(output, np.float32)
        assert np.isnan(output[:, sees]).all(), (kind, number)
        np.testing.assert_array_equal(output[:, ~sees], healthy[:, ~sees])
        again, _ = run(jnp.asarray(qkv, dtype), spoilt, window)
        np.testing.assert_array_equal(np.asarray(again, np.float32), healthy)
    # On a GPU each turn of a loop would wait for the host.
    text = run.lower(jnp.asarray(qkv, dtype), cache, window).as_text()
    assert kernel != "xla" or "while" not in text


@pytest.mark.parametrize("dtype, head_dim", [("float32", 64), ("float32", 96), ("float32", 40), ("bfloat16", 64)])
def test_rotation_and_writing_are_those_of_plain_jnp(lanes, dtype, head_dim):
    """A window at the end, one that would pass it, and numbers that are not finite."""
    qkv, cos, sin = normal(1, 2, 5, 2, 5, head_dim), *normal(2, 2, 2, 5, 1, head_dim // 2)
    qkv[0, 1, 0, 3, 2], qkv[1, 2, 1, 4, 7] = np.inf, np.nan
    cache = tuple(jnp.asarray(normal(seed, 2, 2, 48, head_dim), dtype) for seed in (3, 4))
    window = Window(cos, sin, np.asarray([43, 46], np.int32), np.int32(48))
    rotate = jax.jit(cpu_attention.rotate_and_write)
    is_served = dtype == "float32" and head_dim % 32 == 0
    assert ("failfast_rotate" in rotate.lower(qkv, cache, window).as_text()) == is_served
    got, expected = (by(qkv, cache, window) for by in (rotate, jax.jit(plain_attention.rotate_and_write)))
    for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
        ours, plain = (np.asarray(array, np.float32) for array in (ours, plain))
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[1][1][:, :, :41], cache[1][:, :, :41])


def test_a_window_longer_than_the_cache_is_not_written():
    cache = tuple(jnp.zeros((1, 2, 4, 32)) for _ in range(2))
    window = Window(*normal(2, 2, 1, 5, 1, 16), np.zeros(1, np.int32), np.int32(5))
    with pytest.raises(ValueError, match="wants caches .* of at least W positions"):
        cpu_attention.rotate_and_write(jnp.zeros((1, 5, 2, 3, 32)), cache, window)
