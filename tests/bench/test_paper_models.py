"""The paper's preset with real engines, as a user runs it: rows are lossless, and the tables follow from records."""

from __future__ import annotations

import json

import numpy as np
import pytest
from paper_models import AR, DIFFUSION, EAGLE, GSM8K, MATH, TARGET, write_models, write_rows

from failfast_jax.bench.__main__ import main

pytestmark = pytest.mark.long(rare=True)
STEP, PASS = 52.6, 6.1
"""The authors' latencies of a 32B target and of its drafter, in ms."""
LENGTHS = (3, 4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Flags that name target, drafters and questions."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    write_rows(folder)
    data = [text for name in ("math500", "gsm8k") for text in ("--data", f"{name}={folder / name}.jsonl")]
    models = {"--target": TARGET, "--drafter": DIFFUSION, "--ar-drafter": AR}
    named = [text for flag, name in models.items() for text in (flag, str(folder / name))]
    return [*named, "--set", f"eagle3:drafter={folder / EAGLE}", *data]


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory):
    """The folder of a run of all rows, draft lengths 3 and 4 where the preset sweeps them."""
    out = tmp_path_factory.mktemp("runs") / "run"
    args = ["run", "--preset", "failfast-paper", *weights, "--dataset", "math500,gsm8k", "--limit", "2"]
    args += ["--set", "ar:spec_len=3|4", "fast-dllm+:spec_len=3|4"]
    assert main([*args, "--max-new-tokens", "40", "--no-scores", "--no-figures", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def found(run):
    """Its records by dataset, question and row."""
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {(r["dataset"], r["question"], r["setting"]): r for r in lines if r["kind"] == "answer"}


SWEPT = {"ar": "ar:spec_len={}", "fast-dllm": "fast-dllm+:spec_len={}"}
ROWS = ("eagle3", "suffix", "failfast", "reuse", "congestion", "ar-dynamic", "wide", "tree")
PLACES = [("math500", id) for id, _ in MATH] + [("gsm8k", id) for id, _ in GSM8K]


def of(found, row):
    """A row's records."""
    return [found[*place, row] for place in PLACES]


def test_every_row_is_lossless(found):
    swept = {label.format(n) for label in SWEPT.values() for n in LENGTHS}
    assert {label for *_, label in found} == {"vanilla", *ROWS, *swept} and len(found) == 4 * (1 + len(ROWS) + 4)
    for (dataset, question, label), record in found.items():
        plain = found[dataset, question, "vanilla"]
        assert record["output_ids"] == plain["output_ids"], label
        assert record["finish_reason"] == plain["finish_reason"] and record["prompt_tokens"] == plain["prompt_tokens"]
        assert sum(entry["emitted"] for entry in record["detail"]) in (0, record["tokens"])
        assert sum(entry["passes"] for entry in record["detail"]) == record["drafter_passes"]


def drafted(found, row):
    """All rounds of a row, and the lengths of its drafts."""
    entries = [entry for record in of(found, row) for entry in record["detail"]]
    return entries, [entry["drafted"] for entry in entries]


def test_every_row_drafts_as_its_name_says(found):
    for n in LENGTHS:
        for label in SWEPT.values():
            _, lengths = drafted(found, label.format(n))
            assert max(lengths) == n, label
    entries, _ = drafted(found, "ar:spec_len=4")
    assert {0, 4} < {entry["accepted"] for entry in entries}
    for row in ("failfast", "reuse"):
        entries, lengths = drafted(found, row)
        assert set(lengths) > {10, 20} and max(lengths) <= (70 if row == "failfast" else 140), row
    assert {record["drafter"]["kind"] for record in of(found, "reuse")} == {"aligned"}
    _, lengths = drafted(found, "congestion")
    assert {10} <= set(lengths) <= {10, 20, 30}
    _, lengths = drafted(found, "ar-dynamic")
    assert max(lengths) > 10 and {record["drafter"]["grows"] for record in of(found, "ar-dynamic")} == {True}
    entries, lengths = drafted(found, "wide")
    assert max(lengths) > 10 and all(entry["passes"] <= -(-entry["drafted"] // 10) for entry in entries)
    entries, _ = drafted(found, "tree")
    assert all(10 < entry["nodes"] <= 64 for entry in entries)
    entries, _ = drafted(found, "eagle3")
    assert all(entry["nodes"] <= 60 and entry["drafted"] <= 8 for entry in entries)
    assert sum(entry["accepted"] for entry in entries) > 0
    entries, lengths = drafted(found, "suffix")
    assert max(lengths) > 0 and not any(entry["passes"] for entry in entries)


# -- `bench paper` -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    """The folder that `bench paper` wrote."""
    out = tmp_path_factory.mktemp("paper") / "out"
    places = ["--trajectory", "math500/q1", "--trajectory", "gsm8k/1"]
    assert main(["paper", str(run), *places, "--out", str(out)]) == 0
    return out


def lines_of(page):
    """Cells of all tables."""
    lines = [line.strip("|").split("|") for line in (page / "paper.md").read_text().splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines]


def cells(page, *row):
    """A line of a table, as numbers: of MATH, of GSM8K, and their average. The paper's own stand in brackets."""
    (line,) = [line for line in lines_of(page) if line[: len(row)] == list(row)]
    return [float(cell.split()[0]) if cell[0].isdigit() else None for cell in line[len(row) :]]


def by_hand(records, passes_of, length_of):
    """Means over questions, from what the records of a row hold and nothing else."""
    columns = []
    for record in records:
        accepted, rounds = sum(entry["accepted"] for entry in record["detail"]), len(record["detail"])
        asked, passes = sum(map(length_of, record["detail"])), passes_of(record)
        modelled = (accepted + rounds) * STEP / (rounds * STEP + passes * PASS)
        columns.append((100 * accepted / asked, accepted / rounds, asked / rounds, rounds, passes / rounds, modelled))
    return np.mean(columns, axis=0)


METRICS = ("Acceptance rate, %", "Avg accepted length", "Avg speculated length", "Speculation rounds")
METRICS += ("Drafter passes / round",)


def test_tables_are_means_of_questions(found, page):
    """AR drafter: a pass a token asked for. FailFast: multiples of ten. The suffix tree: no passes."""
    ar = {
        n: [
            by_hand(
                [found["math500", id, f"ar:spec_len={n}"] for id, _ in MATH],
                lambda r, n=n: n * r["rounds"],
                lambda _, n=n: n,
            )
        ]
        for n in LENGTHS
    }
    best = max(LENGTHS, key=lambda n: ar[n][0][-1])
    text = (page / "paper.md").read_text()
    fast = f"Fast-dLLM `fast-dllm+:spec_len={best}`"
    assert f"math500, n = 2: AR drafter `ar:spec_len={best}`, {fast}" in text
    rows = {"AR drafter": ar[best][0]}
    records = {row: [found["math500", id, row] for id, _ in MATH] for row in ("failfast", "suffix")}
    rows["suffix"] = by_hand(records["suffix"], lambda _: 0, lambda entry: entry["drafted"])
    for row, values in rows.items():
        for metric, value in zip(METRICS, values):
            assert cells(page, row, metric)[0] == pytest.approx(value, abs=0.051), (row, metric)
        assert cells(page, row, "modelled, mean of questions")[0] == pytest.approx(values[-1], abs=0.0051)
    values = by_hand(records["failfast"], lambda r: r["drafter_passes"], lambda e: -(-e["drafted"] // 10) * 10)
    for metric, value in zip(METRICS[:-1], values):
        assert cells(page, "FailFast", metric)[0] == pytest.approx(value, abs=0.051), metric
    here, released = (cells(page, "FailFast", f"{METRICS[-1]}{end}")[0] for end in (", as made here", ""))
    assert here == pytest.approx(values[-2], abs=0.051) and released > here
    assert ["FailFast", "Acceptance rate, %", f"{values[0]:.1f} (40.6)"] in [line[:3] for line in lines_of(page)]


def test_averages_and_ratios(page):
    for row in ("AR drafter", "Fast-dLLM", "Fast-dLLM+", "FailFast", "reuse", "wide", "tree", "suffix"):
        first, second, average = cells(page, row, "modelled, mean of questions")
        assert average == pytest.approx((first + second) / 2, abs=0.011)
        if row != "FailFast":
            ratios = cells(page, row, "modelled")
            whole = cells(page, "FailFast", "modelled, mean of questions")
            assert ratios[:2] == pytest.approx([whole[0] / first, whole[1] / second], abs=0.02)
            assert ratios[2] == pytest.approx(sum(ratios[:2]) / 2, abs=0.011)
    # Its passes are not those of a model of 1.5B.
    assert cells(page, "eagle3", "modelled, mean of questions") == [None] * 3
    assert all(value > 0 for value in cells(page, "eagle3", "measured, mean of questions"))


def test_claims_follow_from_the_tables(page):
    claims = {line[0]: line[1] for line in lines_of(page)}
    speculated, passes, accepted = (
        cells(page, "FailFast", metric)[0]
        for metric in ("Avg speculated length", "Drafter passes / round", "Avg accepted length")
    )
    assert float(claims["tokens a pass, FailFast, MATH"]) == pytest.approx(speculated / passes, rel=0.02)
    assert float(claims["... accepted of them"]) == pytest.approx(accepted / passes, rel=0.05)
    rounds = [cells(page, row, "Speculation rounds")[0] for row in ("FailFast", "AR drafter")]
    fewer = float(claims["rounds fewer than with the AR drafter, MATH"].split()[0])
    assert fewer == pytest.approx(100 * (1 - rounds[0] / rounds[1]), abs=0.5)
    ours = {claim: cell for claim, cell in claims.items() if claim.startswith(("Fail", "spec", "...", "to"))}
    assert len(ours) > 10 and "-" not in ours.values()


def test_figures_and_trajectories(page):
    assert {f"{name}.{kind}" for name in ("latency", "strip", "passes") for kind in ("png", "svg")} <= {
        file.name for file in page.iterdir()
    }
    for place in ("math500-q1", "gsm8k-1"):
        text = (page / f"trajectory-{place}.html").read_text()
        for row in ("vanilla", "failfast", "reuse", "wide", "eagle3", "suffix"):
            assert f"<h2>{row}</h2>" in text, row
        assert 'class="rejected"' in text and 'class="accepted"' in text
