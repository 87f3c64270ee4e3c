"""The attention benchmark's own parts, on CPU; its figures need a GPU."""

from __future__ import annotations

import jax
import pytest

from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import kernel_timing
from failfast_jax.util import hardware

CASE = {"heads": (4, 2, 64), "width": 2, "capacity": 256, "dtype": "bfloat16", "block_size": 32}


def test_says_that_there_is_no_gpu(capsys, tmp_path):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert bench.main(["micro", "--parts", "attention", "--out", str(tmp_path / "out.json")]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_unknown_parts_are_named(capsys):
    assert bench.main(["micro", "--parts", "attention,stamina"]) == 2
    assert "--parts: stamina: must be among speed, widths" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, 1])
def test_numerics_of_the_dense_route(seed):
    found = kernel_timing.numerics(kernel_timing.route("xla", 32), seed=seed, **CASE)
    assert found["error"] < kernel_timing.TOLERANCE and found["same_live"] and found["same_start"]


def test_numerics_notice_an_error():
    def wrong(q, k, v, start, until, live):
        out = kernel_timing.route("xla", 32)(q, k, v, start, until, live)
        return out * (1.05 + live / 1000).astype(out.dtype)

    found = kernel_timing.numerics(wrong, seed=0, **CASE)
    assert found["error"] > kernel_timing.TOLERANCE and not found["same_live"]


def test_the_report(monkeypatch, capsys):
    """With the dense route alone, over several caches."""
    for name, value in {"ROTATED_BYTES": 2**16, "CONTEXTS": (128,), "WIDTHS": (2,), "REPEATS": 1}.items():
        monkeypatch.setattr(kernel_timing, name, value)
    monkeypatch.setattr(kernel_timing, "SHAPES", {"small": (2, 1, 64)})
    monkeypatch.setattr(kernel_timing, "routes_of", lambda shape: ["xla"])
    monkeypatch.setattr(hardware, "bandwidth", lambda size: {"copy": 1e9})
    found = kernel_timing.report()
    (row,) = found["times"]
    assert found["numerics_ok"] and row["floor"] == 2 * 128 * 64 * 2 / 1e9 and 0 < row["seconds"]["xla"] < 60
    assert "| small | 128 | 2 | 32.8 | xla " in capsys.readouterr().err
