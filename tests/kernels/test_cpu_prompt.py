"""The CPU's attention of prompts, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import attention_by_hand, tiny_config

from failfast_jax.kernels import cpu_product, cpu_prompt_attention, kernel_table, llvm_emitter
from failfast_jax.kernels.attention_window import AttentionCase, Window
from failfast_jax.kernels.plain_attention import rotated_heads, write_window
from failfast_jax.models.rope import rotary

pytestmark = pytest.mark.skipif(llvm_emitter.vector_unit() is None, reason=cpu_product.NO_UNIT)
CASES = {
    "from the beginning": {"width": 300, "start": [0, 0]},
    "after others": {"width": 129, "start": [700, 31]},
    "one position more than whole pieces": {"width": 257, "start": [255, 256]},
    "block-causal": {"width": 160, "start": [96, 320], "block_size": 32},
    "up to a position of its own": {"width": 140, "start": [3, 500], "until": [100, 630]},
    "a sliding window": {"width": 200, "start": [0, 600], "back": 70},
    "a sliding window as short as a step": {"width": 130, "start": [300, 512], "back": 1},
    "one query head a KV head": {"width": 130, "start": [0, 40], "heads": (2, 1)},
    "seven of them": {"width": 131, "start": [9, 400], "heads": (2, 7)},
    "up to the end of a small cache": {"width": 132, "start": [12, 0], "capacity": 144},
    "up to the end of one and a half chunks": {"width": 256, "start": [128, 100], "capacity": 384},
}


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames="kernel")
def attend(qkv, cache, window, kernel="cpu"):
    return kernel_table.attend(qkv, cache, window, kernel=kernel)


def window_of(width, start, head_dim, *, block_size=1, until=None, back=None, heads=(2, 3), capacity=1024):
    """Heads, caches with something in them, and where the window lies."""
    kv_heads, group = heads
    qkv = jnp.asarray(numbers(1, len(start), width, kv_heads, group + 2, head_dim))
    cache = tuple(jnp.asarray(numbers(seed, len(start), kv_heads, capacity, head_dim)) for seed in (2, 3))
    start = jnp.asarray(start, jnp.int32)
    config = tiny_config(head_dim=head_dim, num_heads=kv_heads * group, num_kv_heads=kv_heads)
    cos, sin = rotary(config, start[:, None] + jnp.arange(width))
    live = jnp.int32(start.max() + width)
    until = None if until is None else jnp.asarray(until, jnp.int32)
    return qkv, cache, Window(cos, sin, start, live, until=until, block_size=block_size, back=back)


@pytest.mark.parametrize("name", CASES)
def test_prompts_attend_as_float64_has_it(name):
    assert_as_by_hand(name, 32)


def test_for_every_processor_and_heads_of_several_panels(unit):
    for head_dim in (32, 96):
        assert_as_by_hand("after others", head_dim)


def assert_as_by_hand(name: str, head_dim: int) -> None:
    qkv, cache, window = window_of(head_dim=head_dim, **CASES[name])
    got, caches = attend(qkv, cache, window)
    q, k, v = rotated_heads(qkv, window.cos, window.sin)
    written = [write_window(old, new, window.start) for old, new in zip(cache, (k, v))]
    np.testing.assert_allclose(caches[0], written[0], atol=1e-6)
    np.testing.assert_array_equal(caches[1], written[1])
    until = 0 if window.until is None else np.asarray(window.until)
    expected = attention_by_hand(q, *written, window.start, window.block_size, until, window.back)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_the_kernel_is_called_and_only_for_prompts():
    def calls(width: int, **changes) -> int:
        qkv, cache, window = window_of(width, [0], 64)
        cache = tuple(layer.astype(changes.get("dtype", jnp.float32)) for layer in cache)
        return (
            attend.lower(qkv, cache, window, kernel=changes.get("kernel", "cpu"))
            .as_text()
            .count("failfast_prompt_attention_64")
        )

    assert calls(129) and not calls(128) and not calls(129, kernel="reference") and not calls(129, dtype=jnp.bfloat16)


def test_rows_that_see_nothing_are_zero_and_what_is_hidden_is_not_read():
    qkv, cache, window = window_of(130, [0], 32)
    cache = tuple(layer.at[:, :, 144:].set(jnp.nan) for layer in cache)  # 130 in whole steps
    nothing = window.replace(live=jnp.int32(0))
    assert not np.any(attend(qkv, cache, nothing)[0])
    assert np.isfinite(attend(qkv, cache, window)[0]).all()


@pytest.mark.parametrize("member", range(5), ids=["q0", "q1", "q2", "k", "v"])
def test_what_is_not_a_number_is_not_hidden(member):
    qkv, cache, window = window_of(150, [40], 32)
    qkv = qkv.at[0, 100, 1, member, 3].set(jnp.nan)
    got, _ = attend(qkv, cache, window)
    bad, expected = np.isnan(got).any(-1)[0], np.zeros((150, 6), bool)
    if member < 3:
        expected[100, 3 + member] = True
    else:
        expected[100:, 3:] = True
    begin = 100 if member == 4 else 0  # a value that is not seen may be multiplied by zero
    np.testing.assert_array_equal(bad[begin:], expected[begin:])
    assert not bad[:, :3].any()


def test_large_scores_and_far_ones():
    """Weights that are one, and weights that vanish: no infinity, no NaN."""
    qkv, cache, window = window_of(300, [400], 32)
    qkv = qkv.at[..., -2, :].multiply(100)
    cache = (cache[0] * 100, cache[1])
    got, caches = attend(qkv, cache, window)
    q, *_ = rotated_heads(qkv, window.cos, window.sin)
    np.testing.assert_allclose(got, attention_by_hand(q, *caches, window.start, 1), atol=5e-4)


def test_shapes_that_are_not_served():
    served = {"width": 129, "capacity": 256, "head_dim": 64, "dtype": "float32"}
    lanes = llvm_emitter.vector_unit().lanes
    assert cpu_prompt_attention.refuses(AttentionCase(**served)) is None
    changes = {
        "more than 128 rows, not 128": {"width": 128},
        "a multiple of 16": {"capacity": 200},
        f"head_dim 4: a multiple of {lanes}": {"head_dim": 4},
        "a cache of bfloat16: float32": {"dtype": "bfloat16"},
        "a tree": {"pattern": "tree"},
    }
    for message, change in changes.items():
        assert message in cpu_prompt_attention.refuses(AttentionCase(**served | change))
    _, cache, window = window_of(130, [0], 64)
    q = jnp.ones((1, 130, 6, 64))
    with pytest.raises(ValueError, match="keys and values of one shape and type"):
        cpu_prompt_attention.attend(q, (cache[0], cache[1].astype(jnp.bfloat16)), window)
    with pytest.raises(ValueError, match="rows, not 128"):
        cpu_prompt_attention.attend(q[:, 2:], cache, window)
