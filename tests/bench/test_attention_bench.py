"""The attention benchmark's own parts, on CPU; its figures need a GPU."""

from __future__ import annotations

import argparse

import jax
import pytest

from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import attention

CASE = {"heads": (4, 2, 64), "width": 2, "capacity": 256, "dtype": "bfloat16", "block_size": 32}


def test_says_that_there_is_no_gpu(capsys, tmp_path):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert bench.main(["micro", "--parts", "attention", "--out", str(tmp_path / "out.json")]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--shapes", "gpt"], "--shapes: 'gpt'"),
        (["--routes", "flash"], "--routes: 'flash'"),
        (["--contexts", "64"], "--contexts"),
        (["--contexts", "65536"], "--contexts"),
        (["--parts", "attention,stamina"], "--parts: stamina: must be among speed, widths"),
    ],
)
def test_bad_flags_are_named(flags, message, capsys):
    assert bench.main(["micro", "--parts", "attention", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, 1])
def test_numerics_of_the_dense_route(seed):
    found = attention.numerics(attention.route("xla", 32), seed=seed, **CASE)
    assert found["error"] < attention.TOLERANCE and found["same_live"] and found["same_start"]


def test_numerics_notice_an_error():
    def wrong(q, k, v, start, until, live):
        out = attention.route("xla", 32)(q, k, v, start, until, live)
        return out * (1.05 + live / 1000).astype(out.dtype)

    found = attention.numerics(wrong, seed=0, **CASE)
    assert found["error"] > attention.TOLERANCE and not found["same_live"]


def test_timing_runs_over_several_caches(monkeypatch):
    monkeypatch.setattr(attention, "ROTATED_BYTES", 2**16)
    monkeypatch.setitem(attention.SHAPES, "small", (2, 1, 64))
    args = argparse.Namespace(batch=1, capacity=128, dtype="bfloat16", repeats=1)
    seconds = attention.time_call(attention.route("xla", 1), "small", 2, 128, args)
    assert 0 < seconds < 60


def test_the_times_are_a_table():
    row = {"shape": "qwen2.5-7b", "context": 1024, "width": 8, "floor": 1e-6, "seconds": {"kernel": 2e-6, "xla": 4e-6}}
    assert attention.table([row]).splitlines()[-1] == "| qwen2.5-7b | 1024 | 8 | 1.0 | 2.0 (2.00) | 4.0 (4.00) |"
