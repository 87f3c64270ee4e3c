"""`bench` with real engines: the paper's preset, its tables, and published drafters of one target."""

from __future__ import annotations

import json

import pytest
from paper_models import AR, DIFFUSION, EAGLE, FIELD, TARGET, write_models, write_rows

from failfast_jax.bench.__main__ import main

pytestmark = pytest.mark.long(rare=True)
ROWS = ("eagle3", "suffix", "failfast", "reuse", "congestion", "ar-dynamic", "wide")
SWEPT = [f"{row}:spec_len={length}" for row in ("ar", "fast-dllm+") for length in (3, 4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of all rows, draft lengths 3 and 4 where the preset sweeps them."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("runs") / "run"
    write_models(models)
    write_rows(models)
    args = ["run", "--preset", "failfast-paper", "--target", str(models / TARGET)]
    args += ["--drafter", str(models / DIFFUSION), "--ar-drafter", str(models / AR)]
    args += ["--dataset", "math500,gsm8k", "--data", *(f"{d}={models / d}.jsonl" for d in ("math500", "gsm8k"))]
    args += ["--set", f"eagle3:drafter={models / EAGLE}", "ar:spec_len=3|4", "fast-dllm+:spec_len=3|4"]
    args += ["--limit", "2", "--max-new-tokens", "40", "--no-scores", "--no-figures", "--out", str(out)]
    assert main(args) == 0
    return out


@pytest.fixture(scope="module")
def records(run):
    """By dataset, question and row."""
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {(r["dataset"], r["question"], r["setting"]): r for r in lines if r["kind"] == "answer"}


def test_every_row_is_lossless(records):
    assert {label for *_, label in records} == {"vanilla", *ROWS, *SWEPT} and len(records) == 4 * 12
    for (dataset, question, label), record in records.items():
        plain = records[dataset, question, "vanilla"]
        assert record["output_ids"] == plain["output_ids"], label
        assert record["finish_reason"] == plain["finish_reason"] and record["prompt_tokens"] == plain["prompt_tokens"]
        assert sum(entry["emitted"] for entry in record["detail"]) in (0, record["tokens"])
        assert sum(entry["passes"] for entry in record["detail"]) == record["drafter_passes"]


def test_tables_and_claims_are_filled(run, tmp_path):
    """EAGLE-3's passes are not those of a model of 1.5B, and have no price."""
    assert main(["paper", str(run), "--out", str(tmp_path)]) == 0
    lines = [line.strip("|").split("|") for line in (tmp_path / "paper.md").read_text().splitlines() if line[:1] == "|"]
    # Cells of MATH; the paper's own stand in brackets.
    cells = {(row.strip(), metric.strip()): value.split()[0] for row, metric, value, *_ in lines}
    passes = [float(cells["FailFast", f"Drafter passes / round{text}"]) for text in (", as made here", "")]
    assert 0 < passes[0] < passes[1]
    assert cells["eagle3", "modelled, mean of questions"] == "-"
    assert float(cells["eagle3", "measured, mean of questions"]) > 0
    claims = {claim: ours for claim, ours in cells if claim.startswith(("Fail", "spec", "...", "to"))}
    assert len(claims) > 10 and "-" not in claims.values()


def test_all_drafters_of_one_target(tmp_path, capsys):
    """Each method with its own drafter; of `all` those that the one drafter does not serve are left out by name."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps([3, 17, 40]) + "\n")
    published = {"dflash": "dflash_qwen3_a", "dspark": "dspark_qwen3_a", "eagle3": "deepspec_eagle3_qwen3_a"}
    methods = ",".join(f"{method}:drafter={FIELD / name}" for method, name in published.items())
    args = ["--dataset", str(prompts), "--target", str(FIELD / "qwen3_a"), "--max-new-tokens", "12", "--no-figures"]
    assert main([*args, "--methods", methods, "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["prompts.jsonl"]["settings"]
    for method, name in published.items():
        row = rows[f"{method}:drafter={FIELD / name}"]
        assert row["tau"] == pytest.approx(row["accepted_per_round"] + 1) and row["tau"] > 1
        assert row["verdicts"]["equal"] == 1 and row["passes_per_round"] > 0 and row["verified_per_round"] > 1
    capsys.readouterr()
    drafter = ["--drafter", str(FIELD / published["dspark"])]
    assert main([*args, *drafter, "--methods", "all", "--out", str(tmp_path / "all")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"| {method} |" in text for method in ("dspark", "dflash", "failfast"))
    assert "`eagle3` (" in text and "needs a drafter of kind eagle" in text
