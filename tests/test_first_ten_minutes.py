"""The script that measures a new machine: its file, and that one part's fault leaves the others."""

from __future__ import annotations

import json
from unittest.mock import Mock

import jax

from tpu_scripts import first_ten_minutes as script


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
