"""Attention over the cache: against a dense numpy reference, and bit for bit against itself."""

from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import attention_by_hand

from failfast_jax import FailFast
from failfast_jax.checkpoints.checkpoint import Checkpoint
from failfast_jax.checkpoints.pair import read_pair
from failfast_jax.errors import OptionError
from failfast_jax.kernels import kernel_table, llvm_emitter, plain_attention
from failfast_jax.kernels.attention_window import TILE, Window
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, attend_written, kernel_of, refusal, unserved
from failfast_jax.kernels.plain_attention import write_window
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.kv_cache import round_up
from failfast_jax.util import progress

CAPACITY = 384
HEAD_DIM = 8


def arrays(seed: int, batch: int, width: int, heads: int, kv_heads: int, capacity: int = CAPACITY):
    rng = np.random.default_rng(seed)
    shape = (batch, kv_heads, capacity, HEAD_DIM)
    q = rng.standard_normal((batch, width, heads, HEAD_DIM), np.float32)
    return q, rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


@functools.partial(jax.jit, static_argnames=("block_size", "back", "kernel"))
def attend(q, k, v, start, live, block_size, until=None, back=None, kernel="reference"):
    window = Window(None, None, start, live, until=until, back=back, block_size=block_size)
    return attend_written(q, (k, v), window, kernel=kernel)


both_kernels = pytest.mark.parametrize("kernel", ["reference", "cpu"])


# Few shapes, so that few programs are compiled; what varies freely is not static.
SHAPES = [(1, 1, 4, 4), (2, 5, 4, 2), (1, 16, 6, 2), (3, 4, 3, 1)]


def attention_case(shape, seed, starts, block_size):
    batch, width, heads, kv_heads = shape
    q, k, v = arrays(seed, batch, width, heads, kv_heads)
    start = np.asarray(starts[:batch], np.int32)
    live = int(start.max() + width - 1) // block_size * block_size + block_size
    return q, k, v, start, np.int32(live)


cases = given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 99),
    starts=st.lists(st.integers(0, CAPACITY - 32), min_size=3, max_size=3),
    block_size=st.sampled_from([1, 4, 8, 32]),
)


@both_kernels
@settings(max_examples=60)
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
    got = attend(q, k, v, starts, np.int32(start + 8), 1, until, back, kernel)
    expected = attention_by_hand(q, k, v, starts, 1, until, back)
    np.testing.assert_allclose(got, expected, atol=2e-5)


@both_kernels
@settings(max_examples=30)
@cases
def test_what_lies_behind_the_live_part_does_not_matter(kernel, shape, seed, starts, block_size):
    q, k, v, start, live = attention_case(shape, seed, starts, block_size)
    expected = np.asarray(attend(q, k, v, start, live, block_size, kernel=kernel))
    k[:, :, live:] = v[:, :, live:] = 1e4
    np.testing.assert_array_equal(attend(q, k, v, start, live, block_size, kernel=kernel), expected)
    for longer in (live + 1, round_up(int(live), TILE) + TILE, CAPACITY + 7):
        longer = attend(q, k, v, start, np.int32(longer), block_size, kernel=kernel)
        np.testing.assert_array_equal(longer, expected)


@both_kernels
@settings(max_examples=20)
@given(seed=st.integers(0, 99), row=st.integers(8, CAPACITY - 9), block_size=st.sampled_from([1, 8]))
def test_a_row_does_not_depend_on_where_its_window_begins(kernel, seed, row, block_size):
    width = 8
    q, k, v = arrays(seed, 1, CAPACITY, 4, 2)
    results = []
    for start in range(row - width + 1, row + 1):
        window = q[:, start : start + width]
        live = np.int32(min(start + width + block_size, CAPACITY))
        out = attend(window, k, v, np.asarray([start], np.int32), live, block_size, kernel=kernel)
        results.append(np.asarray(out)[0, row - start])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("length", [None, 21])
def test_whole_sequences_without_a_cache(block_size, length):
    batch, width, heads, kv_heads = 2, 24, 4, 2
    q, k, v = arrays(3, batch, width, heads, kv_heads, capacity=width)
    got = plain_attention.dense_attention(
        *(jnp.asarray(x) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2))), block_size=block_size, length=length
    )
    end = length or width
    expected = attention_by_hand(q, k[:, :, :end], v[:, :, :end], np.zeros(batch), block_size)
    np.testing.assert_allclose(got[:, :end], expected[:, :end], atol=2e-5)


def kinds_of_windows(width: int, start):
    """What rows see: causal, blocks, the last positions, a tree's branch, and groups that see three slots of theirs."""
    below = np.broadcast_to(np.tril(np.ones((width, width), bool)), (len(start), width, width))
    own = start[:, None] + np.arange(0, width, 4)
    groups = np.stack([start[:, None] + 0 * own] * 3 + [own, own + 3], 2).astype(np.int32)
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
        *((kind, 8, dtype) for kind in ("causal", "sliding", "tree") for dtype in ("float32", "float16")),
        ("blocks", 8, "bfloat16"),
        ("groups", 8, "float16"),
        ("causal", 136, "float32"),
        ("sliding", 136, "float32"),
    ],
)
def test_what_is_not_finite_spoils_only_rows_that_see_it(kernel, kind, width, dtype):
    """A key or a value of a window's row 5, which the next pass writes over."""
    rng, batch, head_dim = np.random.default_rng(0), 2, 32
    dtype = "float32" if kernel == "xla" else dtype  # on CPU XLA has no other
    start, at = np.asarray([8, 200], np.int32), np.arange(width)
    sees = at >= 5
    sees &= at < 8 if kind == "sliding" else True
    sees = at // 4 == 1 if kind == "groups" else at >= 4 if kind == "blocks" else sees
    qkv = rng.standard_normal((batch, width, 2, 4, head_dim), np.float32)
    tables = (
        np.ones((batch, width, 1, head_dim // 2), np.float32),
        np.zeros((batch, width, 1, head_dim // 2), np.float32),
    )
    options = kinds_of_windows(width, start)[kind]
    window = Window(*tables, start, np.int32(start.max() + width), **options)
    cache = tuple(jnp.asarray(rng.standard_normal((batch, 2, CAPACITY, head_dim)), dtype) for _ in range(2))
    run = jax.jit(functools.partial(kernel_table.attend, kernel=kernel))
    healthy, _ = run(jnp.asarray(qkv, dtype), cache, window)
    for member, number in ((3, np.inf), (3, -np.inf), (3, np.nan), (2, np.nan)):
        bad = qkv.copy()
        bad[:, 5, :, member, 7] = number
        out, spoilt = run(jnp.asarray(bad, dtype), cache, window)
        out = np.asarray(out, np.float32)
        assert np.isnan(out[:, sees]).all(), (kind, number)
        np.testing.assert_array_equal(out[:, ~sees], np.asarray(healthy, np.float32)[:, ~sees])
        again, _ = run(jnp.asarray(qkv, dtype), spoilt, window)
        np.testing.assert_array_equal(again, healthy)


def test_padding_that_is_not_finite_spoils_no_whole_sequence():
    q, k, v = (jnp.asarray(x) for x in arrays(3, 2, 24, 4, 2, capacity=24))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    run = functools.partial(plain_attention.dense_attention, block_size=8, length=21)
    np.testing.assert_array_equal(run(q, k, v.at[:, 22].set(jnp.inf))[:, :21], run(q, k, v)[:, :21])


@both_kernels
def test_a_pass_nobody_listens_to_has_finite_results(kernel):
    q, k, v = arrays(0, 2, 4, 4, 2)
    out = attend(q, k, v, np.asarray([300, 0], np.int32), np.int32(0), 1, kernel=kernel)
    assert np.isfinite(out).all()


def test_write_window_writes_each_row_at_its_place():
    cache = jnp.zeros((2, 1, TILE, HEAD_DIM))
    window = jnp.ones((2, 3, 1, HEAD_DIM)) * jnp.asarray([1.0, 2.0])[:, None, None, None]
    written = np.asarray(write_window(cache, window, jnp.asarray([5, 100])))
    expected = np.zeros(cache.shape, np.float32)
    expected[0, :, 5:8], expected[1, :, 100:103] = 1, 2
    np.testing.assert_array_equal(written, expected)


DEVICES = {
    "v2": ("tpu", "TPU v2"), "v3": ("tpu", "TPU v3"), "v4": ("tpu", "TPU v4"), "v5e": ("tpu", "TPU v5 lite"),
    "7x": ("tpu", "TPU7x"), "T4": ("gpu", "7.5"), "A100": ("gpu", "8.0"), "L4": ("gpu", "8.9"), "H100": ("gpu", "9.0"),
    "B200": ("gpu", "10.0"), "MI300X": ("gpu", "gfx942"), "none": ("gpu", None), "other": ("metal", None),
}  # fmt: skip


def a(name: str) -> SimpleNamespace:
    """A device, as far as a kernel is chosen by it."""
    platform, kind = DEVICES[name]
    return SimpleNamespace(platform=platform, device_kind=kind if platform == "tpu" else name, compute_capability=kind)


BF16, F16, F32 = "bfloat16", "float16", "float32"


@pytest.mark.parametrize(
    "devices, dtypes, head_dims, kernel",
    [
        ("v4 v5e 7x", (BF16, F32), (64, 128, 256), "tpu"),
        ("v4 v5e 7x", (F16,), (64, 128, 256), "reference"),
        ("v2 v3", (BF16, F16, F32), (64, 128, 256, 100), "reference"),
        ("v4 v5e 7x", (BF16, F16, F32), (16, 80, 96, 100, 160, 512), "reference"),
        ("H100", (BF16, F16), (64, 128), "gpu"),
        ("H100", (BF16, F16), (80, 96, 160, 256), "cudnn"),
        ("B200", (BF16, F16), (64, 80, 128, 160, 256), "cudnn"),
        ("A100 L4", (BF16, F16), (64, 80, 128), "cudnn"),
        ("A100 L4", (BF16, F16), (100, 160, 256), "xla"),
        ("H100 B200", (BF16, F16), (100, 512), "xla"),
        ("A100 L4 H100 B200", (F32,), (64, 128), "xla"),
        ("T4 MI300X none", (BF16, F16, F32), (64, 100, 128), "xla"),
        ("other", (BF16, F32), (64, 100), "reference"),
    ],
)
def test_the_device_the_type_and_the_heads_choose_the_kernel(devices, dtypes, head_dims, kernel):
    for name, dtype, head_dim in itertools.product(devices.split(), dtypes, head_dims):
        model = {"dtype": dtype, "head_dim": head_dim}
        case, reason = (name, dtype, head_dim), unserved(a(name), **model)
        assert kernel_of(a(name), dtype, head_dim) == kernel, case
        assert refusal(kernel, a(name), **model) is None, case
        # XLA is not chosen without a reason, which is a line.
        assert (reason is None) == (kernel not in ("xla", "reference") or name == "other"), case
        assert reason is None or "\n" not in reason, case


@pytest.mark.parametrize(
    "kernel, device, model, message",
    [
        ("tpu", "v3", {}, "need a TPU v4 or later, this is a TPU v3"),
        ("tpu", "v5e", {"dtype": F16}, "a cache of float16"),
        ("tpu", "v5e", {"head_dim": 100}, "head_dim 100: 64, 128 or 256"),
        ("tpu", "v5e", {"heads": 5, "kv_heads": 2}, "5 query heads for 2 KV heads"),
        ("tpu", "A100", {}, "JAX sees no TPU here, it runs on gpu"),
        ("gpu", "v5e", {}, "JAX sees no GPU here, it runs on tpu"),
        ("gpu", "A100", {}, "9.x (Hopper), not 8.0"),
        ("gpu", "MI300X", {}, "not gfx942"),
        ("gpu", "H100", {"head_dim": 160}, "head_dim is 64 or 128, not 160"),
        ("cudnn", "MI300X", {}, "8.0 (Ampere) or later, not gfx942"),
        ("cudnn", "T4", {}, "not 7.5"),
        ("cudnn", "A100", {"head_dim": 160}, "up to 128 on this GPU, not of 160"),
        ("cudnn", "H100", {"dtype": F32}, "not of float32"),
        ("cpu", "H100", {}, "no CPU"),
        (SIMULATED_TPU, "A100", {}, "set JAX_PLATFORMS=cpu"),
    ],
)
def test_a_kernel_says_why_it_does_not_serve(kernel, device, model, message):
    assert message in refusal(kernel, a(device), **({"dtype": BF16, "head_dim": 128} | model))


def test_a_cpu_runs_its_own_kernel_where_it_has_a_vector_unit():
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    assert kernel_of(cpu, BF16, 128) == ("cpu" if llvm_emitter.vector_unit() else "reference")
    assert kernel_of(cpu, BF16, 6) == "reference" and unserved(cpu, dtype=BF16, head_dim=6)
    for kernel in ("reference", "xla", SIMULATED_TPU):
        assert refusal(kernel, cpu, dtype=F16, head_dim=100) is None


@pytest.mark.parametrize("drafter", [None, GOLDEN / "fast_dllm_v2_untied"])
def test_kernels_are_refused_before_weights_are_read(drafter, monkeypatch):
    """Of the target, and of its drafter; heads of 16 are for no TPU."""
    monkeypatch.setattr(jax, "devices", lambda: [a("v5e")])
    monkeypatch.setattr(Checkpoint, "load", lambda *args, **options: pytest.fail("weights are read"))
    name = str(drafter or GOLDEN / "qwen2_target_160")
    with pytest.raises(OptionError, match=f"^--attention tpu: {re.escape(name)}: .* head_dim [0-9]+: 64, 128 or 256$"):
        read_pair(GOLDEN / "qwen2_target_160", drafter, LoadOptions(attention="tpu"))


def test_xla_says_once_that_it_attends_instead(caplog):
    progress.warn_once.cache_clear()
    for _ in range(2):
        engine = FailFast(GOLDEN / "qwen2_target_160", attention=SIMULATED_TPU)
    [line] = [record.message for record in caplog.records if "attention runs in XLA" in record.message]
    assert "qwen2_target_160: attention runs in XLA: the TPU's kernels do not take head_dim" in line
    assert engine.target.execution.resolved(engine.target.dtype, engine.target.config.head_dim) == "reference"
