"""The script that measures a new machine: its file, and that one part's fault leaves the others."""

from __future__ import annotations

import json
from unittest.mock import Mock

import jax
import pytest

from tpu_scripts import first_ten_minutes as script


@pytest.mark.long(rare=True)  # the notebook runs it, too
def test_a_dry_run(tmp_path, capsys):
    """All of it, small, on the CPU: the TPU's kernels are interpreted."""
    out = tmp_path / "cpu.json"
    assert script.main(["--out", str(out), "--quick"]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["dry_run"] and record["device"] == jax.devices()[0].device_kind and record["jax"] == jax.__version__
    parts = record["parts"]
    assert list(parts) == ["installation", "kernels", "answer", "replay"]
    assert {finding["name"] for finding in parts["installation"]["findings"]} > {"Python", "devices", "decoding"}
    [check] = parts["kernels"]["checks"]
    assert check["right"] and check["error"] < 1e-5 and check["kernel"] == "simulated-tpu"
    answers = {(answer["method"], answer["exact"]): answer for answer in parts["answer"]["answers"]}
    assert parts["answer"]["right"] and answers.keys() == {
        (m, e) for m in ("vanilla", "failfast") for e in (True, False)
    }
    assert answers["failfast", True]["drafted"] > 0 == answers["vanilla", True]["drafted"]
    passes = {entry["pass"]: entry for entry in parts["replay"]["passes"]}
    assert {"plain step", "verify of 64 rows", "drafter pass of 32 rows"} <= passes.keys()
    assert all(0 < entry["floor_ms"] < entry["measured_ms"] for entry in passes.values())
    assert "a dry run" in capsys.readouterr().err


def test_a_part_that_fails_leaves_the_others(tmp_path, capsys, monkeypatch):
    parts = {"fails": Mock(side_effect=RuntimeError("out of memory")), "last": Mock(return_value={"right": True})}
    monkeypatch.setattr(script, "PARTS", parts | {"wrong": Mock(return_value={"right": False})})
    out = tmp_path / "here.json"
    assert script.main(["--out", str(out)]) == 1
    assert capsys.readouterr().out.endswith("here.json: wrong: fails, wrong\n")
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts["fails"]["error"] == "RuntimeError: out of memory" and parts["last"]["right"]


def test_measured_beside_predicted():
    """The timeline's figure where there is one of this target on one such chip; else none."""
    kind = jax.devices()[0].device_kind
    cases = [("another", "tiny", 1, 70.0), (kind, "other", 1, 60.0), (kind, "tiny", 4, 50.0), (kind, "tiny", 1, 10.0)]
    estimates: list[dict] = [{"device": kind, "case": {"target": "tiny", "tp": 1}}]
    for device, target, tp, ms in cases:
        passes = {name: {"ms": ms + n} for n, name in enumerate(("verify(8)", "verify(16)", "drafter"))}
        estimates.append({"device": device, "case": {"target": target, "tp": tp}, "passes": passes})
    figures = {"ms": 2.0, "floor_ms": 1.0}
    record = {"target": "tiny", "vanilla": figures, "verify": {"16": figures, "72": figures}}
    record |= {"drafter_pass": {"32": figures, "64": figures}}
    lines = script.beside_predictions(record, estimates)
    assert [line["timeline_ms"] for line in lines] == [10.0, 11.0, None, 12.0, None]
    assert [line["pass"] for line in lines[:2]] == ["plain step", "verify of 16 rows"]
    assert {line["timeline_ms"] for line in script.beside_predictions(record, [])} == {None}
