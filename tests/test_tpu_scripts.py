"""Scripts for TPUs: figures of compiled programs, predictions beside measured speeds, checks of a new machine."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest

from failfast_jax.public_data import published_speeds
from failfast_jax.public_data.published_speeds import Measurement, Passes
from tpu_scripts import first_ten_minutes as script
from tpu_scripts import hlo

PROGRAM = """HloModule program

ENTRY %main (p: bf16[512], q: bf16[128]) -> f32[8] {
  %p = bf16[512]{0:T(1024)} parameter(0)
  %q = bf16[128]{0:T(1024)} parameter(1)
  %copy-start = (bf16[512]{0:T(1024)S(1)}, bf16[512]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  %fusion = f32[8]{0:T(1024)S(1)} fusion(%q), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %psum.1 = f32[8]{0:T(1024)S(1)} all-reduce(%fusion), to_apply=%add
  %copy-done = bf16[512]{0:T(1024)S(1)} copy-done(%copy-start)
  ROOT %fusion.1 = f32[8]{0:T(1024)S(1)} fusion(%copy-done, %psum.1), backend_config={"estimated_cycles":"50"}
}
"""
"""1,024 bytes fetched beside a fusion that reads 256 bytes."""


def timeline(text: str, rate: float, other: tuple[float, float] = (0, 0)) -> tuple[float, int]:
    """Seconds, and bytes that move between HBM and the core, where every kernel and collective takes `other`."""
    estimate = hlo.timeline(text, clock=100, rate=rate, others=lambda *_: other)
    return estimate.seconds, estimate.traffic


@pytest.mark.parametrize(
    "rate, sum_s, expected",
    [
        (1e9, 0, 1.5),  # the copy has arrived long before it is waited for
        (512, 0, 1 + 1.5 + 0.5),  # 512 - 256 bytes arrive beside the fusion, the rest is waited for
        (512, 1, 1 + 1 + 0.5 + 0.5),  # 512 more beside the sum
        (512, 3, 1 + 3 + 0.5),
    ],
)
def test_copies_move_beside_what_computes(rate, sum_s, expected):
    assert timeline(PROGRAM, rate, (sum_s, 0)) == (pytest.approx(expected), 1024 + 256)


def test_slices_that_the_compiler_wrote_are_copies():
    """It calls `async-start` what `Compiled.as_text` calls `slice-start`."""
    part = "((s8[1024]{0:T(1024)}), s8[768]{0:T(1024)S(1)}, s32[]{:S(2)})"
    written = PROGRAM.replace(
        "(bf16[512]{0:T(1024)S(1)}, bf16[512]{0:T(1024)}, u32[]{:S(2)}) copy-start", f"{part} async-start"
    )
    written = written.replace(" copy-done(", " async-done(").replace("%copy-", "%slice-")
    named = written.replace(" async-", " slice-")
    for text in (written, named):
        assert timeline(text, 512) == (1 + 1 + 0.5, 768 + 256)


@pytest.mark.parametrize(
    "groups, devices",
    [
        ("[4,2]<=[8]", 2),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("mesh['copies'=4,'tensor'=2] {'tensor'}", 2),
        ("mesh['copies'=4,'tensor'=2] {'copies', 'tensor'}", 8),
        ("{}", 0),
    ],
)
def test_a_sum_says_how_many_devices_take_part(groups, devices):
    line = f"%psum.3 = bf16[32,1536] all-reduce(%x), channel_id=2, replica_groups={groups}, to_apply=%r"
    assert hlo.devices_of(line) == devices


OFFLOADED = """HloModule program

ENTRY %main (p: bf16[512], q: bf16[128]) -> f32[8] {
  %p = bf16[512]{0:T(1024)} parameter(0)
  %q = bf16[128]{0:T(1024)} parameter(1)
  %all-reduce.7.call-start = ((), (), (s32[83]{0:T(1)S(11)})) async-start(), async_execution_thread="sparsecore"
  %fusion = bf16[8]{0:T(1024)} fusion(%q), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %all-reduce.7.call-update = ((bf16[8]{0}), bf16[8]{0}) async-update(%all-reduce.7.call-start, %fusion)
  %fusion.1 = f32[8]{0:T(1024)S(1)} fusion(%q), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %all-reduce.7.call-done = bf16[8]{0:T(1024)} async-done(%all-reduce.7.call-update)
  ROOT %fusion.2 = f32[8]{0:T(1024)S(1)} fusion(%all-reduce.7.call-done), backend_config={"estimated_cycles":"50"}
}
"""
"""A sum that another core makes: it begins when its operand is there, beside a fusion of a second."""


@pytest.mark.parametrize(("sum_s", "expected"), [(0, 2.5), (0.5, 2.5), (1, 2.5), (3, 1 + 3 + 0.5)])
def test_a_sum_of_another_core_runs_beside_what_computes(sum_s, expected):
    lines = {}

    def others(name: str, line: str, _: float) -> tuple[float, float]:
        lines[name] = line
        return sum_s, 0

    estimate = hlo.timeline(OFFLOADED, clock=100, rate=1e9, others=others)
    # The fusions' operands and results in HBM, and nothing of the sum itself.
    assert (estimate.seconds, estimate.traffic) == (pytest.approx(expected), 256 + 16 + 256 + 16)
    assert lines.keys() == {"all-reduce.7.call-done"}
    assert hlo.hbm_bytes_of(lines["all-reduce.7.call-done"].partition(" async-done(")[0]) == 16


def test_other_asynchronous_operations_are_named_and_left_out():
    text = OFFLOADED.replace("all-reduce.7.call", "sort_offload_async")
    assert hlo.unread(text) == ["sort_offload_async-start"] and hlo.unread(OFFLOADED) == []
    assert timeline(text, 1e9, (9, 9)) == (2.5, 256 + 16 + 256 + 16)
    odd = PROGRAM.replace("to_apply=%add", "replica_groups={}")
    assert hlo.unread(odd) == ["psum.1"]


LOOK_UP = """HloModule program

ENTRY %main (p: bf16[64,128], q: s32[8]) -> f32[8] {
  %p = bf16[64,128]{1,0:T(8,128)} parameter(0)
  %q = s32[8]{0:T(1024)S(1)} parameter(1)
  %gather_offload_async_start = ((), (), (s32[83]{0:T(1)S(11)}, /*index=1*/s32[0]{0})) async-start(), calls=%c
  %fusion = s32[8]{0:T(1024)S(1)} fusion(%q), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %gather_offload_async_start.update = ((bf16[64,128]{1,0}, s32[8]{0}), bf16[8,128]{1,0}, (s32[83]{0})) async-update(%gather_offload_async_start, %p, %fusion)
  %fusion.1 = f32[8]{0:T(1024)S(1)} fusion(%q), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %gather_offload_async_done = bf16[8,128]{1,0:T(8,128)} async-done(%gather_offload_async_start.update)
  ROOT %fusion.2 = f32[8]{0:T(1024)S(1)} fusion(%fusion.1), backend_config={"estimated_cycles":"9223372036854775807"}
}
"""  # noqa: E501
"""Rows of a table, 2,048 bytes, that another core fetches beside a fusion of a second: as libtpu 0.0.52 writes it."""


@pytest.mark.parametrize(("rate", "expected"), [(4096, 2), (1024, 1 + 2)])
def test_a_look_up_of_another_core_reads_its_rows(rate, expected):
    assert hlo.unread(LOOK_UP) == []
    assert timeline(LOOK_UP, rate) == (pytest.approx(expected), 2048)
    started = LOOK_UP.replace("async-start()", "async-start(%p, %q)").replace("start.update)", "start)")
    assert timeline(started, 1024)[0] == pytest.approx(2)


def test_speeds_are_predicted_as_by_hand():
    """Four clients. Two devices: a step of 2 ms, a verify of 3, a draft of 1; eight: 1, 1.5 and 0.5.

    4 / 2 ms and 4 / 1 ms plain; 4 * 3 / (3 + 1) ms at the least and 4 * 5 / (1.5 + 0.5) ms at most with drafts; in both
    layouts a round takes two steps, so that 3 to 5 tokens are a speedup of 1.5 to 2.5.
    """
    passes = {2: Passes(plain=2.0, verify=3.0, draft=1.0), 8: Passes(plain=1.0, verify=1.5, draft=0.5)}
    names = {"source": "us", "chip": "TPU", "topology": "v5e:2x4", "target": "qwen3-8b", "drafter": "dspark-qwen3-8b"}
    sizes = {"clients": 4, "context": 100, "verify_rows": 8, "tokens_a_round": (3.0, 5.0)}
    published = {"plain": 1000.0, "drafted": 2000.0, "speedup": 2.0}
    load = Measurement(**names, **sizes, passes_ms=passes, published=published)
    assert load.predicted() == {"plain": (2000, 4000), "drafted": (3000, 10_000), "speedup": (1.5, 2.5)}
    assert load.errors() == {"plain": (2, 4), "drafted": (1.5, 5), "speedup": (0.75, 1.25)}
    *_, plain, drafted, speedup = published_speeds.table([load]).splitlines()
    assert plain.startswith(
        "| us, TPU, qwen3-8b, dspark | 4 | 2 or 8 | plain, tokens/s | 1,000 | 2,000 to 4,000 | 2.00"
    )
    assert drafted.endswith("| with drafts, tokens/s | 2,000 | 3,000 to 10,000 | 1.50 to 5.00 |")
    assert speedup.endswith("| speedup | 2.00 | 1.50 to 2.50 | 0.75 to 1.25 |")


def test_the_page_of_predictions_has_what_the_report_prints():
    assert len(published_speeds.measurements()) >= 3
    page = (Path(__file__).parents[1] / "docs" / "predictions.md").read_text(encoding="utf-8")
    assert published_speeds.table(published_speeds.measurements()) in page
    for source in published_speeds.data()["sources"].values():
        assert source["url"] in page


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
