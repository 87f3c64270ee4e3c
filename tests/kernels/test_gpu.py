"""GPU attention against a dense softmax: the kernel simulated on CPU, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from tiny_models import attention_by_hand

from failfast_jax.kernels import cudnn_attention, gpu_attention
from failfast_jax.kernels.attention_window import Window

# batch, width, query heads, KV heads, capacity, head_dim, dtype, block_size, splits
# Each split has more tiles than the kernel keeps in flight.
CAUSAL = (2, 3, 4, 2, 384, 128, "bfloat16", 1, 2)
BLOCKS = (1, 8, 3, 1, 640, 64, "float16", 32, 2)
MANY_ROWS = (1, 18, 4, 1, 384, 64, "bfloat16", 32, 1)  # 72 rows: two blocks read the same tiles


INTERPRET = jax.default_backend() != "gpu"
"""Where there is a Hopper GPU the numerics are checked on it."""


def arrays(shape, seed):
    batch, width, heads, kv_heads, capacity, head_dim, dtype, _, _ = shape
    draw = np.random.default_rng(seed)
    q = draw.normal(size=(batch, width, heads, head_dim))
    k, v = draw.normal(size=(2, batch, kv_heads, capacity, head_dim))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def attention_by(attend, block_size: int):
    """The function of queries, both caches, start, until and live that a kernel's `attend` is."""

    def run(q, k, v, start, until, live):
        return attend(q, (k, v), Window(None, None, start, live, until=until, block_size=block_size))

    return run


@functools.cache
def compiled(shape):
    *_, block_size, splits = shape
    attend = functools.partial(gpu_attention.attend, interpret=INTERPRET, splits=splits)
    return jax.jit(attention_by(attend, block_size))


@st.composite
def lengths(draw, shape):
    """Places of the windows, and a number of leading positions that has at least those that a query sees."""
    batch, width, _, _, capacity, _, _, block_size, _ = shape
    start = draw(st.lists(st.integers(0, capacity - width), min_size=batch, max_size=batch))
    until = [draw(st.sampled_from([0, s + width - 1, min(s + 70, capacity - 1)])) for s in start]
    ends = [max((s + width - 1) // block_size * block_size + block_size, u + 1) for s, u in zip(start, until)]
    return start, until, draw(st.integers(min(max(ends), capacity), capacity)), draw(st.integers(0, 99))


@pytest.mark.parametrize("shape", [CAUSAL, BLOCKS, MANY_ROWS], ids=["causal", "blocks", "many rows"])
@settings(max_examples=4)
@given(data=st.data())
def test_the_kernel_is_a_softmax_over_what_each_row_sees(shape, data):
    start, until, live, seed = data.draw(lengths(shape))
    q, k, v = arrays(shape, seed)
    out = compiled(shape)(q, k, v, jnp.asarray(start), jnp.asarray(until), jnp.int32(live))
    assert out.dtype == q.dtype and out.shape == q.shape
    expected = attention_by_hand(q, k, v, start, shape[-2], until)
    assert np.abs(np.asarray(out, np.float64) - expected).max() < 2e-2 * np.abs(expected).max()


def test_no_tile_is_overwritten_before_it_is_read(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

    monkeypatch.setattr(gpu_attention, "simulator", lambda: params.InterpretGPUParams(detect_races=True))
    rows, last = jnp.zeros((1, 1, 1, gpu_attention.ROWS, 64), jnp.bfloat16), jnp.full((1, 1, gpu_attention.ROWS), 383)
    cache = jnp.zeros((1, 1, 384, 64), jnp.bfloat16)
    attend = jax.jit(functools.partial(gpu_attention.attend_splits, splits=1, interpret=True))
    jax.block_until_ready(attend(jnp.asarray([6]), last, rows, cache, cache))
    assert not interpret_pallas_call.get_races().races_found


def test_a_row_depends_neither_on_live_nor_on_where_its_window_began():
    _, width, *_ = CAUSAL
    run = compiled(CAUSAL)
    q, k, v = arrays(CAUSAL, 5)
    line = jnp.concatenate([q, q[:, ::-1] * 2, q + 1], axis=1)  # queries of positions 125, 126, ...

    def window(begin, live):
        start = jnp.full((2,), 125 + begin)
        return np.asarray(run(line[:, begin : begin + width], k, v, start, 0 * start, jnp.int32(live)))

    first = window(0, 128)
    assert np.array_equal(first, window(0, 256))
    # Position 127 is the last of its tile; the windows that begin there and before read one tile more.
    for begin in (1, 2):
        assert np.array_equal(first[:, begin:], window(begin, 192)[:, : width - begin]), begin


def test_dead_tiles_are_never_read():
    q, k, v = arrays(CAUSAL, 6)
    start, until = jnp.asarray([10, 70]), jnp.zeros(2, jnp.int32)
    clean = compiled(CAUSAL)(q, k, v, start, until, jnp.int32(256))
    # The first sequence sees one tile, the second two.
    k, v = (x.at[0, :, 64:].set(jnp.nan).at[1, :, 128:].set(jnp.nan) for x in (k, v))
    assert np.array_equal(clean, compiled(CAUSAL)(q, k, v, start, until, jnp.int32(256)))
    # A pass nobody listens to leaves numbers, not NaN.
    assert np.isfinite(np.asarray(compiled(CAUSAL)(q, k, v, start, until, jnp.int32(0)), np.float32)).all()


def test_splits_are_combined_in_groups():
    draw, shape = np.random.default_rng(0), (11, 1, 2, 3)
    acc, highest, total = draw.normal(size=(*shape, 128)), 9 * draw.normal(size=shape), draw.uniform(1, 2, size=shape)
    combine = functools.partial(gpu_attention.combine_splits, width=3, group=1, dtype=jnp.float32, interpret=True)
    for tiles in (9, 40):  # splits without a tile have written nothing
        parts = [jnp.asarray(x, jnp.float32).at[tiles:].set(jnp.nan) for x in (acc, highest, total)]
        weight = np.exp2(highest - highest[:tiles].max(0))[:tiles]
        expected = (acc[:tiles] * weight[..., None]).sum(0) / (total[:tiles] * weight).sum(0)[..., None]
        output = combine(jnp.asarray([tiles]), *parts)
        np.testing.assert_allclose(output[:, :, :, 0].transpose(0, 2, 1, 3), expected, rtol=1e-5, atol=1e-6)


def test_lowers_for_cuda():
    cache = jax.ShapeDtypeStruct((2, 4, 32768, 128), "float16")
    q, rows = jax.ShapeDtypeStruct((2, 72, 28, 128), "float16"), jax.ShapeDtypeStruct((2,), jnp.int32)
    attend = jax.jit(attention_by(gpu_attention.attend, 32))
    lowered = export.export(attend, platforms=["cuda"])(q, cache, cache, rows, rows, jax.ShapeDtypeStruct((), "int32"))
    assert lowered.mlir_module().count("stablehlo.custom_call @mosaic_gpu") == 2
    assert lowered.out_avals[0].shape == q.shape


def spoilt_at(slot: int, shape, seed: int):
    q, k, v = arrays(shape, seed)
    return q, k.at[:, :, slot, 3].set(jnp.nan), v.at[:, :, slot, 3].set(0)


def test_keys_that_are_nan_spoil_only_rows_that_see_them():
    rest = (jnp.asarray([200, 90]), jnp.asarray([0, 0]), jnp.int32(384))
    both = spoilt_at(201, CAUSAL, 1), arrays(CAUSAL, 1)
    out, healthy = (np.asarray(compiled(CAUSAL)(*x, *rest), np.float32) for x in both)
    assert np.isnan(out[0, 1:]).all()
    np.testing.assert_array_equal(out[0, 0], healthy[0, 0])
    np.testing.assert_array_equal(out[1], healthy[1])


def test_cudnn_adds_masks_and_yet_hides_nan(monkeypatch):
    attention_of = jax.nn.dot_product_attention

    def like_cudnn(q, k, v, mask, implementation):
        assert implementation == "cudnn"
        return attention_of(q, k, v, bias=jnp.where(mask, 0, -1e30).astype(q.dtype), implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", like_cudnn)
    shape = (2, 150, 6, 2, 256, 64, "bfloat16", 32, None)
    rest = (jnp.asarray([0, 77]), jnp.asarray([200, 0]), jnp.int32(256))
    run = attention_by(cudnn_attention.attend, 1)
    out, healthy = (np.asarray(run(*x, *rest), np.float32) for x in (spoilt_at(220, shape, 1), arrays(shape, 1)))
    sees = 77 + np.arange(150) >= 220
    assert np.isnan(out[1, sees]).all()
    np.testing.assert_array_equal(out[1, ~sees], healthy[1, ~sees])
    np.testing.assert_array_equal(out[0], healthy[0])
