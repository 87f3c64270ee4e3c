"""The TPU kernels, interpreted: against plain jnp, and bit for bit against themselves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failfast_jax.kernels import reference, tpu
from failfast_jax.models.cache import TILE, write_window

# Batch, window, query heads, KV heads, head dimension, capacity, dtype. Few, so that few programs are compiled.
SHAPES = [
    (1, 8, 10, 2, 64, 2048, "float32"),  # two tiles of 1024, both KV heads in a step
    (3, 5, 3, 1, 128, 384, "float32"),  # tiles of 128
    (2, 72, 21, 3, 64, 512, "bfloat16"),  # one KV head a step
]


def arrays(shape, seed: int):
    batch, width, heads, kv_heads, head_dim, capacity, dtype = shape
    rng = np.random.default_rng(seed)

    def normal(*size):
        return jnp.asarray(rng.standard_normal(size), dtype)

    return (
        normal(batch, width, heads, head_dim),
        normal(batch, kv_heads, capacity, head_dim),
        normal(batch, kv_heads, capacity, head_dim),
    )


@functools.partial(jax.jit, static_argnames="block_size")
def attend(q, k, v, start, until, live, block_size):
    return tpu.window_attention(q, k, v, start, until, live, block_size=block_size, interpret=True)


@functools.partial(jax.jit, static_argnames="block_size")
def expected(q, k, v, start, until, live, block_size):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return reference.window_attention(q, k, v, start, until, live, block_size=block_size, tile=TILE)


def close(shape, got, wanted) -> bool:
    tolerance = 1e-5 if shape[-1] == "float32" else 2e-2
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted)
    return bool(np.max(np.abs(got - wanted)) <= tolerance * max(1.0, np.abs(wanted).max()))


@settings(max_examples=12)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 99),
    places=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    block_size=st.sampled_from([1, 32]),
    bidirectional=st.booleans(),
)
def test_equals_the_reference(shape, seed, places, block_size, bidirectional):
    batch, width, capacity = shape[0], shape[1], shape[5]
    start = np.asarray([int(place * (capacity - width - 32)) for place in places[:batch]], np.int32)
    until = start + width - 1 if bidirectional else np.zeros_like(start)
    live = np.int32(start.max() + width + block_size)
    q, k, v = arrays(shape, seed)
    got = attend(q, k, v, start, until, live, block_size)
    assert close(shape, got, expected(q, k, v, start, until, live, block_size))


def test_a_broken_mask_is_noticed(monkeypatch):
    right = tpu.visible_until
    shape = SHAPES[1]
    q, k, v = arrays(shape, 0)
    start, until, live = np.asarray([40, 77, 0], np.int32), np.zeros(3, np.int32), np.int32(120)
    wanted = expected(q, k, v, start, until, live, 8)
    for off, passes in ((0, True), (-1, False), (1, False)):
        monkeypatch.setattr(tpu, "visible_until", lambda p, d, off=off: right(p, d) + off)
        got = tpu.window_attention(q, k, v, start, until, live, block_size=8, interpret=True)
        assert close(shape, got, wanted) is passes


def test_a_row_depends_neither_on_its_window_nor_on_dead_cache():
    shape = (1, 8, 10, 2, 64, 2048, "float32")
    _, k, v = arrays(shape, 1)
    rows = np.random.default_rng(2).standard_normal((1, 2048, 10, 64), np.float32)
    results = []
    for start in (1020, 1023, 1027):
        live = np.int32(start + 8)
        dead = (np.arange(2048) >= live)[:, None]
        window = jnp.asarray(rows[:, start : start + 8])
        zero = np.zeros(1, np.int32)
        out = attend(window, jnp.where(dead, 1e4, k), jnp.where(dead, 1e4, v), zero + start, zero, live, 1)
        longer = attend(window, k, v, zero + start, zero, np.int32(2048), 1)
        np.testing.assert_array_equal(out, longer)
        results.append(np.asarray(out)[0, 1027 - start])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_each_window_at_its_place(dtype):
    _, k, v = arrays((3, 1, 2, 2, 64, 256, dtype), 0)
    new, _, _ = arrays((3, 7, 2, 2, 64, 256, dtype), 1)
    write = jax.jit(functools.partial(tpu.write_window, interpret=True))
    for start in ([0, 9, 249], [16, 100, 241], [15, 240, 3]):
        start = np.asarray(start, np.int32)
        got_k, got_v = write(k, v, new, new + 1, start)
        np.testing.assert_array_equal(got_k, write_window(k, new, start))
        np.testing.assert_array_equal(got_v, write_window(v, new + 1, start))


@pytest.mark.parametrize("block_size", [1, 32])
def test_prefill_equals_the_reference(block_size):
    shape = (1, 128, 4, 2, 128, 512, "float32")
    q, k, v = arrays(shape, 3)
    start, until, live = np.asarray([130], np.int32), np.zeros(1, np.int32), np.int32(130 + 128 + 32)
    got = tpu.prefill_attention(q, k, v, start, until, live, block_size=block_size, interpret=True)
    assert close(shape, got, expected(q, k, v, start, until, live, block_size))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 129}, "a window of 129 rows"),
        ({"heads": 5}, "5 query heads for 2 KV heads"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"capacity": 200}, "a cache of 200 positions"),
        ({"dtype": jnp.float16}, "a cache of float16"),
    ],
)
def test_says_what_it_does_not_support(change, message):
    fine = {"width": 8, "heads": 4, "kv_heads": 2, "capacity": 256, "head_dim": 64, "dtype": jnp.bfloat16}
    assert tpu.supports(**fine) is None
    assert message in tpu.supports(**(fine | change))
