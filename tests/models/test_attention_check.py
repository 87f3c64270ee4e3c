"""The check of a device's attention kernel notices what a kernel can do wrong."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

from failfast_jax.kernels.kernel_table import attend
from failfast_jax.models import attention_check
from failfast_jax.models.attention_check import check_attention, is_right

CASE = {"heads": 3, "kv_heads": 1, "head_dim": 64, "rows": 4, "start": 125, "block_size": 4, "kernel": "reference"}


def test_plain_attention_is_right():
    result = check_attention(**CASE)
    assert is_right(result) and result["error"] == result["cache_error"] == 0 and result["kernel"] == "reference"


FAULTS = {
    "outputs": lambda out, k, v, call: (out.at[0, 3].multiply(1.05), k, v),
    "a row of NaN": lambda out, k, v, call: (out.at[0, 0].set(jnp.nan), k, v),
    "keys": lambda out, k, v, call: (out, k.at[:, :, 126].add(1.0), v),
    "values one position late": lambda out, k, v, call: (out, k, v.at[:, :, 126:129].set(v[:, :, 125:128])),
    "a value before the window": lambda out, k, v, call: (out, k, v.at[:, :, 124].add(1e-6)),
    "a key after it": lambda out, k, v, call: (out, k.at[:, :, 129].set(0), v),
    "a race": lambda out, k, v, call: (out.at[0, 0].add(1e-6 * call), k, v),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(attention_check.jax, "jit", lambda function: function)  # so that calls can differ
    monkeypatch.setattr(attention_check, "CALLS", 2)

    def wrong(qkv, cache, window, kernel="plain"):
        out, written = attend(qkv, cache, window)
        if kernel == "plain":
            return out, written
        out, *written = FAULTS[fault](out, *written, next(calls))
        return out, tuple(written)

    monkeypatch.setattr(attention_check, "attend", wrong)
    assert not is_right(check_attention(**CASE))
