"""The arithmetic of the report and of the figures."""

import json

import numpy as np
import pytest

from failfast_jax.bench import figures, harness, report, summary
from failfast_jax.bench.journal import Journal
from failfast_jax.bench.rows import BASELINE, Row
from failfast_jax.bench.speedup_model import parse_latency
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, OTHER_SAMPLE
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset, Question


def made_up(method, prompt, seconds, tokens, rounds=(), **changes):
    """A record; `rounds`: `(confidences, accepted)` of each."""
    detail = [{"drafted": len(c), "accepted": a, "emitted": a + 1, "passes": 2, "confidence": c} for c, a in rounds]
    return {
        "setting": method,
        "question": str(prompt),
        "repeat": 0,
        "block": "b",
        "decode_s": seconds,
        "tokens": tokens,
        "rounds": len(detail) or tokens,
        "drafted": sum(d["drafted"] for d in detail),
        "accepted": sum(d["accepted"] for d in detail),
        "drafter_passes": sum(d["passes"] for d in detail),
        "detail": detail,
        **changes,
    }


ROUNDS = [([0.7, 0.9], 2), ([0.75, 0.5, 0.5], 0), ([], 0), ([1.0, 0.2], 1)]
RECORDS = [
    made_up("vanilla", 0, 4.0, 7),
    made_up("vanilla", 1, 6.0, 13),
    made_up("failfast", 0, 1.0, 7, ROUNDS, verdict="equal"),
    made_up("failfast", 1, 3.0, 13, ROUNDS, verdict="near-tie"),
]


def test_totals():
    table = report.totals(RECORDS, ["failfast"])
    assert table["vanilla"]["tokens_per_s"] == 2.0 and table["vanilla"]["speedup"] == 1.0
    row = table["failfast"]
    assert (row["max_accepted"], row["max_drafted"]) == (2, 3) and row["acceptance_rate"] == 6 / 14
    assert row["passes_per_round"] == 2.0
    latency = parse_latency("1:10")
    for label in table:
        used = {name: table[label][name] for name in ("tokens", "rounds", "passes")}
        table[label]["modelled"] = latency.speedup(**used)
    names = {"vanilla": "vanilla", "failfast": "fast"}
    vanilla, failfast = report.summary_table(table, names, latency.name).splitlines()[2:]
    assert vanilla.startswith("| vanilla | 2.0 | 1.00 | - |")
    assert failfast == (
        "| fast | 5.0 | 2.50 | 3.00 (2.50 to 3.50; 2.00 to 4.00) | 43 % | 0.75 / 1.8 | 1.75 | 2.8 | 2 / 3 "
        "| 4.0 | 2.00 | 2.08 | 1 / 1 / 0 | - |"
    )


def test_what_was_accepted_beyond_the_end_is_not_counted():
    cut = made_up("lookup", 0, 1.0, 6, [([0.8] * 7, 7), ([0.8] * 7, 7)])
    cut["detail"][-1]["emitted"] = 2
    row = report.totals([made_up("vanilla", 0, 1.0, 6), cut], ["lookup"])["lookup"]
    assert row["accepted_per_round"] == (7 + 2) / 2
    assert report.calibration([cut], "lookup")["rounds"][8]["accepted"] == 7.0


def test_of_repeats_the_median_counts():
    again = [record | {"repeat": 1, "decode_s": 2.0} for record in RECORDS]
    row = report.totals(RECORDS + again, ["failfast"])["failfast"]
    assert row["speedup"] == 14 / 8
    spread = row["prompt_speedup"]
    # 4 s beside 1, and 6 beside 3; the second time 2 beside 2 for both.
    one, other = (4 / 1 + 2 / 2) / 2, (6 / 3 + 2 / 2) / 2
    assert (spread["median"], spread["min"], spread["max"]) == ((one + other) / 2, other, one)


def test_calibration():
    found = report.calibration(RECORDS[:3], "failfast")
    assert [b["count"] for b in found["rounds"]] == [0, 0, 0, 0, 0, 0, 0, 2, 0, 1]
    bin7, bin9 = found["rounds"][7], found["rounds"][9]
    assert bin7["confidence"] == pytest.approx(0.725) and bin7["first_accepted"] == 0.5 and bin7["accepted"] == 1.0
    assert (bin9["confidence"], bin9["first_accepted"], bin9["accepted"]) == (1.0, 1.0, 1.0)
    assert found["rounds"][0]["accepted"] is None
    # Judged: 0.7 and 0.9 accepted, 0.75 rejected (what follows it is not judged), 1.0 accepted, 0.2 rejected.
    assert [b["count"] for b in found["tokens"]] == [0, 0, 1, 0, 0, 0, 0, 2, 0, 2]
    assert found["ece"] == pytest.approx((1 * 0.2 + 2 * abs(0.5 - 0.725) + 2 * abs(1.0 - 0.95)) / 5)
    text = report.calibration_table({"failfast": found})
    assert "| 0.7-0.8 | 2: mean 0.72, first token 50 %, accepted 1.00 |" in text and "over 5 tokens |" in text
    assert "| 0.0-0.1 | - |" in text


def test_acceptance_by_position():
    found = report.calibration(RECORDS[:3], "failfast")
    assert found["positions"] == [
        {"position": 1, "drafts": 3, "accepted": 2 / 3},
        {"position": 2, "drafts": 3, "accepted": 1 / 3},
        {"position": 3, "drafts": 1, "accepted": 0.0},
    ]
    short = report.calibration([made_up("lookup", 0, 1.0, 2, [([0.5], 1)])], "lookup")
    head, _, *rows = report.positions_table({"failfast": found, "lookup": short}).splitlines()
    assert head == "| accepted up to position | 1 | 2 | 3 |"
    assert rows == ["| failfast | 67 % | 33 % | 0 % |", "| lookup | 100 % | - | - |"]


def test_without_drafts():
    records = [made_up("vanilla", 0, 4.0, 2), made_up("lookup", 0, 4.0, 2, [([], 0), ([], 0)])]
    table, found = report.totals(records, ["lookup"]), report.calibration(records, "lookup")
    assert found["ece"] is None and found["positions"] == [] and table["lookup"]["acceptance_rate"] is None


def test_the_fastest_is_named():
    def row(speedup, decode_s, rounds, passes):
        figures = {"speedup": speedup, "decode_s": decode_s, "rounds": rounds}
        return {**figures, "rounds_per_answer": rounds / 2, "passes_per_round": passes}

    table = {BASELINE: row(None, 8.0, 80, None), "lookup": row(2.0, 4.0, 40, 0.0), "failfast": row(1.6, 5.0, 25, 2.0)}
    names = {label: label for label in table}
    assert report.verdict_on_speed(table, names) == (
        "Fastest: `lookup` 2.00 x: 20.0 rounds an answer, 100.0 ms and 0.00 drafter passes a round; against that "
        "`failfast` 1.60 x: 12.5 rounds an answer, 200.0 ms and 2.00 drafter passes a round."
    )
    table["failfast"]["speedup"] = 2.5
    assert report.verdict_on_speed(table, names).startswith("Fastest: `failfast` 2.50 x")
    table["failfast"]["speedup"], table["lookup"]["speedup"] = 0.5, 0.9
    assert report.verdict_on_speed(table, names).startswith(
        "None is faster than plain decoding. The fastest is `lookup`"
    )
    assert report.verdict_on_speed({BASELINE: table[BASELINE]}, {BASELINE: BASELINE}) is None


def test_easy_regions():
    def made(*rounds):
        return {"detail": [{"drafted": d, "accepted": a, "emitted": e} for d, a, e in rounds]}

    answer = made((3, 3, 4), (3, 1, 2), (0, 0, 1), (2, 2, 3), (4, 4, 2))
    easy = figures.easy_tokens(answer)
    assert easy == [True] * 4 + [True, False] + [False] + [True] * 3 + [True] * 2
    assert figures.easy_share([answer], [0, 4, 5, 9]) == [10 / 12, 10 / 12, 0.0, 0.0]


def test_dollar_signs_of_names_are_no_formulas(tmp_path):
    figure = figures.figure_class()()
    figure.suptitle("questions of $a^$b[1].jsonl")
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").is_file()


def drawn(figure):
    """Points of each line of a figure's first panel, and what its axes say."""
    axis = figure.axes[0]
    return [line.get_xydata().tolist() for line in axis.lines], axis.get_xlabel() + axis.get_ylabel()


def test_figures_count_as_the_summary_says(tmp_path):
    """A draft of ten that the answer's end cut to four, of which two count: as released it is one of ten, in a pass and
    a prefill, and three were accepted."""
    shape = {"kind": "aligned", "spec_len": 10, "grows": True, "block": 32, "shift": 1}
    place = {"kind": "answer", "dataset": "d", "drafter": shape, "prompt_tokens": 40}
    entry = {"drafted": 4, "accepted": 3, "emitted": 2, "passes": 1, "ids": [1] * 4, "confidence": [0.5] * 4}
    options = {"spec_len": 10, "tau": 0.3}
    plain = {**made_up(BASELINE, 0, 4.0, 2), **place, "method": BASELINE, "options": {}}
    rows = [plain]
    for tau, seconds in ((0.3, 2.0), (0.6, 1.0)):
        record = {
            **made_up(f"f:{tau}", 0, seconds, 2),
            **place,
            "method": "failfast",
            "options": {**options, "tau": tau},
        }
        rows.append({**record, "detail": [entry], "rounds": 1, "drafted": 4, "drafter_passes": 1})
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {row["setting"]: {"modelled": 3.5} for row in rows}
    table = {"rows": {label: label for label in settings}, "settings": settings}
    expected = {"ours": ([1, 0.5], [4.0], [2.0], ""), "released": ([2, 0.3], [10.0], [3.0], "released code")}
    for counted, (point, speculated, accepted, said) in expected.items():
        (tmp_path / "summary.json").write_text(json.dumps({"count_passes": counted, "datasets": {"d": table}}))
        records = figures.Records(tmp_path)
        lines, words = drawn(figures.acceptance_against_compute(records))
        assert lines == [[point, point]] and said in words
        lines, words = drawn(figures.length_cdf(records))
        assert [sorted({x for x, _ in line if np.isfinite(x)}) for line in lines[:2]] == [accepted, speculated]
        assert said in words
    lines, words = drawn(figures.sensitivity(records, "tau"))
    assert lines == [[[0.3, 2.0], [0.6, 4.0]], [[0.3, 3.5], [0.6, 3.5]]] and "dashed: modelled" in words


@pytest.mark.parametrize("by, best", [("timed", "ar:spec_len=2"), ("modelled", "ar:spec_len=8")])
def test_the_best_point_of_a_sweep(by, best):
    """By the clock, or by the model of the paper; EAGLE-3's layer costs another pass than the model's."""
    variants = [Row(f"ar:spec_len={n}", "ar", {"spec_len": n}, "ar") for n in (2, 8)]
    variants += [Row(f"eagle3:spec_len={n}", "eagle3", {"spec_len": n}, "eagle3") for n in (2, 3)]
    records = [made_up(BASELINE, 0, 9.0, 9)]
    for variant in variants:
        n = variant.options["spec_len"]
        rounds = [([0.5] * n, n)] * (8 // n if variant.method == "ar" else 1)
        records.append({**made_up(variant.label, 0, float(n), 9, rounds)})
    dataset = Dataset("d", (Question("0", "x"),))
    found = summary.of_dataset(
        dataset, variants, [{**r, "dataset": "d"} for r in records], parse_latency("1:10"), {}, by
    )
    assert found["sweeps"]["ar"]["best"] == best and found["sweeps"]["ar"]["by"] == by
    assert found["sweeps"]["eagle3"] == {
        "points": [v.label for v in variants[2:]],
        "best": "eagle3:spec_len=2",
        "by": "timed",
    }
    assert found["rows"][best] == f"ar (best{'' if by == 'timed' else ' modelled'}: {best.partition(':')[2]})"
    assert found["settings"]["eagle3:spec_len=2"]["modelled"] is None and found["settings"][best]["modelled"] > 1
    text = report.sweep_table(found["settings"], found["sweeps"]["ar"]["points"], best)
    assert "| modelled |" in text.splitlines()[0] and f"| **{best}** |" in text


def test_other_samples_are_no_differences():
    """Rejection sampling promises `vanilla`'s distribution, not its tokens."""
    journal = Journal(None, {})
    place = {"kind": "answer", "dataset": "d", "question": "0", "repeat": 0, "block": "b"}
    journal.append({**place, "setting": BASELINE, "output_ids": [1, 2], "compared": True})
    for label, ids, compared in (("same", [1, 2], False), ("sampled", [3], False), ("wrong", [3], True)):
        journal.append({**place, "setting": label, "output_ids": ids, "compared": compared})
    verdicts = {record["setting"]: record.get("verdict") for record in journal.judged(1e-3, False)}
    assert verdicts == {BASELINE: None, "same": EQUAL, "sampled": OTHER_SAMPLE, "wrong": DIFFERENT}
    config = GenerationConfig(temperature=0.7)
    assert harness.promises_equality(config)
