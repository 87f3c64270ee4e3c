"""The TPU kernels, interpreted where there is no TPU: against plain jnp, and bit for bit against themselves."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from failfast_jax.kernels import blocks, plain_attention, tpu_attention, tpu_blocks, tpu_prompt
from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, attend
from failfast_jax.kernels.plain_attention import apply_rope, write_windows
from failfast_jax.models import sharding

INTERPRET = jax.default_backend() != "tpu"
"""Where there is a TPU the same tests run on it."""
KERNEL = SIMULATED_TPU if INTERPRET else "tpu"
TOLERANCES = {"float32": 1e-5 if INTERPRET else 1e-4, "bfloat16": 2e-2}
"""Of outputs, relative to the largest: a TPU's exponentials and divisions are not a CPU's."""


def in_full(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference whose products of float32 are full ones on a TPU, too; its default rounds what is multiplied."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args, **options)

    return run


# Batch, window, query heads, KV heads, head dimension, capacity, dtype. Few, so that few programs are compiled.
LONG_TILES = (1, 8, 10, 2, 64, 2048, "float32")  # two tiles of 1024, both KV heads in a step
TILES = (3, 16, 3, 1, 128, 384, "float32")  # tiles of 128
HALF_LANES = (2, 72, 21, 3, 64, 384, "bfloat16")  # three KV heads in a step, in rows of half the lanes
TWO_STEPS = (2, 72, 16, 4, 128, 384, "float32")  # two steps of two KV heads


def arrays(shape, seed: int):
    """Projections that are not rotated yet, and both caches."""
    batch, width, heads, kv_heads, head_dim, capacity, dtype = shape
    rng = np.random.default_rng(seed)

    def normal(*size):
        return jnp.asarray(rng.standard_normal(size), dtype)

    return (
        normal(batch, width, kv_heads, heads // kv_heads + 2, head_dim),
        normal(batch, kv_heads, capacity, head_dim),
        normal(batch, kv_heads, capacity, head_dim),
    )


def angles(start, width: int, head_dim: int):
    """Cosines and sines `[B, W, 1, H / 2]`."""
    frequencies = 1.0 / 10_000.0 ** (jnp.arange(0, head_dim, 2) / head_dim)
    at = (start[:, None] + jnp.arange(width))[..., None, None] * frequencies
    return jnp.cos(at), jnp.sin(at)


@functools.partial(jax.jit, static_argnames="block_size")
def attended(qkv, k, v, start, until, live, block_size):
    """The heads' outputs, and the caches with the window's own keys and values."""
    window = Window(*angles(start, qkv.shape[1], qkv.shape[4]), start, live, until=until, block_size=block_size)
    out, cache = tpu_attention.attend(qkv, (k, v), window, interpret=INTERPRET)
    return out, *cache


@in_full
@functools.partial(jax.jit, static_argnames="block_size")
def expected(qkv, k, v, start, until, live, block_size):
    cos, sin = angles(start, qkv.shape[1], qkv.shape[4])
    k, v = write_windows((k, v), apply_rope(qkv[..., -2, :], cos, sin), qkv[..., -1, :], start)
    wide = (x.astype(jnp.float32) for x in (qkv, k, v))
    window = Window(cos, sin, start, live, until=until, block_size=block_size)
    return attend(next(wide), tuple(wide), window)[0], k, v


def close(shape, got, wanted) -> bool:
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    return bool(np.max(np.abs(got - wanted)) <= TOLERANCES[shape[-1]] * max(1.0, np.abs(wanted).max()))


def check(shape, start, block_size: int = 1, until=None, seed: int = 5) -> None:
    """Keys and outputs are the reference's but for rounding, values to the bit."""
    start = np.asarray(start, np.int32)
    until = 0 * start if until is None else np.asarray(until, np.int32)
    live = np.int32(min(start.max() + shape[1] + block_size - 1, shape[5]))
    arguments = *arrays(shape, seed), start, until, live, block_size
    results, wanted = attended(*arguments), expected(*arguments)
    assert all(close(shape, *pair) for pair in zip(results, wanted))
    np.testing.assert_array_equal(results[-1], wanted[-1])


@pytest.mark.parametrize(
    "shape, start, block_size, until",
    [
        (LONG_TILES, [1020], 1, None),
        (TILES, [120, 0, 368], 1, None),  # over the border of two tiles; at both ends of the cache
        (TILES, [113, 60, 24], 1, [125, 72, 36]),  # rows see all but the last three; one row is in the second tile
        (TILES, [113, 127, 255], 32, None),
        (HALF_LANES, [57, 255], 32, [128, 326]),
        (TWO_STEPS, [57, 255], 1, None),
        ((1, 128, 3, 3, 64, 128, "bfloat16"), [0], 1, None),  # the whole cache
        # Rows that fill no hardware tile: over the border of two tiles, and to the end of the cache.
        ((3, 4, 8, 2, 64, 256, "bfloat16"), [124, 252, 0], 4, None),
        ((2, 10, 6, 2, 64, 384, "float32"), [120, 374], 10, None),
    ],
)
def test_equals_the_reference(shape, start, block_size, until):
    check(shape, start, block_size, until)


@settings(max_examples=5)
@given(seed=st.integers(0, 99), start=st.lists(st.integers(0, 368), min_size=3, max_size=3), whole=st.booleans())
def test_windows_lie_anywhere(seed, start, whole):
    check(TILES, start, until=[at + 15 for at in start] if whole else None, seed=seed)


def test_a_sequence_beyond_what_is_live_disturbs_nobody():
    shape, start, zero = TILES, np.asarray([0, 20, 300], np.int32), np.zeros(3, np.int32)
    arguments = (*arrays(shape, 6), start, zero, np.int32(36), 1)
    results = attended(*arguments)
    for got, wanted in zip(results, expected(*arguments)):
        assert close(shape, got[:2], wanted[:2]) and np.isfinite(np.asarray(got)).all()
    for got, before in zip(results[1:], arguments[1:3]):
        np.testing.assert_array_equal(got[2], before[2])  # its tile is not read, and so not written


def test_groups_of_rows_see_what_they_are_told():
    """Copies of a block after different texts, of which 16 go at a time; the last is a part of its block."""
    batch, copies, size, kv_heads, head_dim = 2, 18, 8, 2, 64
    qkv, k, v = arrays((batch, copies * size, 3 * kv_heads, kv_heads, head_dim, 384, "float32"), 3)
    start = np.asarray([40, 200], np.int32)
    copy_start = start[:, None] + np.arange(copies) * size
    seen = np.stack([np.broadcast_to(start[:, None], copy_start.shape)] * 3 + [copy_start, copy_start + size], 2)
    # Rows 2 to 5 of the last copy: the block's first one is seen around them.
    seen[:, -1] = np.stack([start + 2, start + 6, start + size, copy_start[:, -1] + 2, copy_start[:, -1] + 6], 1)
    cos, sin = angles(start, size, head_dim)
    window = Window(
        *(jnp.tile(x, (1, copies, 1, 1)) for x in (cos, sin)), start, np.int32(seen.max()), seen=jnp.asarray(seen)
    )
    shown, hidden = (in_full(attend)(qkv, (k, v), window, kernel=kernel) for kernel in (KERNEL, "reference"))
    np.testing.assert_allclose(shown[0], hidden[0], atol=TOLERANCES["float32"])
    np.testing.assert_allclose(shown[1][0], hidden[1][0], atol=1e-6)
    # A copy by itself, as a window whose rows see each other.
    part = slice(2 * size, 3 * size)
    alone = Window(cos, sin, jnp.asarray(start), np.int32(start.max() + size), until=start + size - 1)
    outputs, _ = in_full(attend)(qkv[:, part], (k, v), alone)
    np.testing.assert_allclose(shown[0][:, part], outputs, atol=TOLERANCES["float32"])


def test_a_row_depends_neither_on_its_window_nor_on_dead_cache():
    _, k, v = arrays(LONG_TILES, 1)
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((1, 24, 2, 7, 64), np.float32))
    zero, unrotated = np.zeros(1, np.int32), jnp.ones((1, 8, 1, 32))
    # All windows of one text from position 1016 on: their keys and values are in the cache.
    k, v = write_windows((k, v), rows[..., -2, :], rows[..., -1, :], zero + 1016)

    @jax.jit
    def run(qkv, k, v, start, live):
        window = Window(unrotated, 0 * unrotated, start, live)
        return tpu_attention.attend(qkv, (k, v), window, interpret=INTERPRET)[0]

    results = []
    for start in (1020, 1023, 1027):
        live = np.int32(start + 8)
        dead = (np.arange(2048) >= live)[:, None]
        window = rows[:, start - 1016 : start - 1008]
        out = run(window, jnp.where(dead, 1e4, k), jnp.where(dead, 1e4, v), zero + start, live)
        np.testing.assert_array_equal(out, run(window, k, v, zero + start, np.int32(2048)))
        results.append(np.asarray(out)[0, 1027 - start])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_keys_and_values_have_a_semaphore_each():
    """A wait on one that both share may end when the other's copy has arrived."""
    qkv, k, v = arrays((1, 8, 2, 1, 64, 128, "float32"), 0)
    start = np.asarray([3], np.int32)
    program = jax.make_jaxpr(tpu_attention.attend)(qkv, (k, v), Window(*angles(start, 8, 64), start, np.int32(11)))
    # dma_start(p0) a[0,:,b:b+16,:] -> c[d,e:e+1,f:f+16,:] semaphores[1]
    copies = collections.Counter(re.findall(r"dma_(start|wait)\b.* \w+\[(\d+)\]$", str(program), re.MULTILINE))
    assert len(copies) == 4
    assert copies["start", "0"] == copies["start", "1"] and copies["wait", "0"] == copies["wait", "1"]


def test_no_copy_races_with_what_it_copies(monkeypatch, capfd):
    """The interpreter prints what it finds; only the semaphores that are waited for order copies."""
    params = Mock(wraps=functools.partial(pltpu.InterpretParams, detect_races=True))
    monkeypatch.setattr(pltpu, "InterpretParams", params)
    start, zero = np.asarray([120, 0, 240], np.int32), np.zeros(3, np.int32)
    run = jax.jit(attended.__wrapped__, static_argnames="block_size")
    jax.block_until_ready(run(*arrays(TILES, 8), start, zero, np.int32(256), block_size=1))
    assert params.called and "RACE" not in "".join(capfd.readouterr())


def test_what_is_not_finite_spoils_only_rows_that_see_it():
    """Neither other rows of its window, with which it is moved to its place, nor what lies around it in the cache."""
    start, zero = np.asarray([120, 0, 300], np.int32), np.zeros(3, np.int32)
    qkv, *rest = (*arrays(TILES, 7), start, zero, np.int32(384), 1)
    healthy = np.asarray(attended(qkv, *rest)[0])
    for member, number in ((-1, jnp.inf), (-1, jnp.nan), (-2, -jnp.inf)):
        out, keys, values = map(np.asarray, attended(qkv.at[:, 5, :, member, 3].set(number), *rest))
        np.testing.assert_array_equal(out[:, :5], healthy[:, :5])
        assert np.isnan(out[:, 5:]).all()
        assert np.isnan(keys).any(-1).sum() == 3 and np.isfinite(values).all()


@pytest.mark.parametrize(
    "width, block_size, start, until",
    [
        (512, 1, [257, 900], [0, 0]),  # row 255 is the only one of its tile that sees another tile of the cache
        (256, 32, [0, 640], [300, 1000]),
        (132, 12, [120, 1392], [0, 0]),  # no whole tiles of 128
    ],
)
def test_prefill_equals_the_reference(width, block_size, start, until):
    batch, kv_heads, head_dim, capacity = len(start), 2, 64, 1536
    _, k, v = arrays((batch, width, 4, kv_heads, head_dim, capacity, "float32"), 3)
    q = jnp.asarray(np.random.default_rng(4).standard_normal((batch, width, 4, head_dim), np.float32))
    start, until = np.asarray(start, np.int32), np.asarray(until, np.int32)
    window = Window(None, None, start, np.int32(capacity), until=until, block_size=block_size)
    got = tpu_prompt.attend(q, (k, v), window, interpret=INTERPRET)
    wanted = in_full(plain_attention.attend)(q, (k, v), window)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCES["float32"])


def product_by_words(width: int, group: int, has_minimum: bool, dtype: str, devices: int = 1) -> None:
    """Several blocks of outputs, the last not full; on several devices, each with a part of them, bit for bit."""
    random, outputs, inputs = np.random.default_rng(width), 200, 256
    # Some scales are so small that float16 has less than its usual bits for them.
    scale = random.standard_normal((outputs, inputs // group)) * 10.0 ** random.integers(-6, 1, (outputs, 1))
    minimum = random.standard_normal(scale.shape).astype(jnp.dtype(dtype)) if has_minimum else None
    codes = random.integers(0, 256, (outputs, inputs // 2), np.uint8)
    stored = blocks.StoredMatrix(codes, scale.astype(jnp.dtype(dtype)), minimum, bits=4)
    matrix = jax.jit(functools.partial(blocks.transpose, in_words=True))(stored)
    np.testing.assert_array_equal(matrix.dequantized(), stored.dequantized())
    x = jnp.asarray(random.standard_normal((width, inputs)), jnp.bfloat16)
    multiply = functools.partial(tpu_blocks.product, preferred=jnp.float32, interpret=INTERPRET)
    actual = jax.jit(multiply)(x, matrix)
    wanted = np.asarray(x, np.float64) @ np.asarray(stored.dequantized(), np.float64).T
    np.testing.assert_allclose(actual, wanted, atol=1e-5 * np.abs(wanted).max())
    if devices > 1:
        place = sharding.Execution(mesh=sharding.make_mesh(devices))
        specs = P(), sharding.transposed_specs(P(sharding.TENSOR), matrix)
        spread = place.per_device(multiply, specs, P(None, sharding.TENSOR))
        np.testing.assert_array_equal(jax.jit(spread)(x, matrix), actual)


WORDS = [(1, 32, True, "float16"), (5, 128, False, "float16"), (16, 32, False, "bfloat16"), (64, 128, True, "bfloat16")]


@pytest.mark.parametrize("form", WORDS, ids=lambda form: "-".join(map(str, form)))
def test_products_by_codes_in_words(form, monkeypatch, capfd):
    params = Mock(wraps=functools.partial(pltpu.InterpretParams, detect_races=True))
    monkeypatch.setattr(pltpu, "InterpretParams", params)
    monkeypatch.setattr(tpu_blocks, "OUTPUTS", 128)
    monkeypatch.setattr(tpu_blocks, "MOST_ROWS", 32)
    product_by_words(*form)
    assert not INTERPRET or (params.called and "RACE" not in "".join(capfd.readouterr()))


@pytest.mark.long
def test_products_by_codes_in_words_on_two_devices():
    program = (
        "import os, sys\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "sys.path[:0] = ['tests', 'tests/kernels']\n"
        "import test_tpu\n"
        "test_tpu.product_by_words(5, 32, True, 'float16', devices=2)\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr[-3000:]


def test_products_of_float32_are_full_ones():
    """Of the reference and of every kernel, whatever JAX's default is; bfloat16 has no others than these."""
    q, start = jnp.ones((1, 128, 2, 64)), np.zeros(1, np.int32)
    for dtype, precision in (("float32", "HIGHEST"), ("bfloat16", "DEFAULT")):
        qkv, k, v = arrays((1, 8, 2, 1, 64, 128, dtype), 0)
        rest = (start, start, np.int32(8))
        window = Window(*angles(start, 8, 64), start, np.int32(8))
        programs = [
            jax.make_jaxpr(tpu_attention.attend)(qkv, (k, v), window),
            jax.make_jaxpr(tpu_prompt.attend)(q.astype(dtype), (k, v), window),
        ]
        if dtype == "float32":
            programs.append(jax.make_jaxpr(functools.partial(expected, block_size=1))(qkv, k, v, *rest))
        for program in programs:
            names = re.findall(r"precision=\(?(None|Precision\.\w+|\w+)", str(program))
            assert {name.removeprefix("Precision.") for name in names} == {precision}
