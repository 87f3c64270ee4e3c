"""Arithmetic of the summary and of the figures."""

import io
import json

import numpy as np
import pandas as pd
import pytest
from paper_records import answer

from failfast_jax.bench import plots, summary
from failfast_jax.bench.answer_log import DIFFERENT, EQUAL, NEAR_TIE, OTHER_SAMPLE, AnswerLog, rounds_of
from failfast_jax.bench.comparison import promises_equality
from failfast_jax.bench.paper.extension import easy_share, easy_tokens
from failfast_jax.bench.rows import BASELINE, Row
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset, Question


def record(setting, question, seconds, tokens, rounds=(), **changes):
    method = setting.partition(":")[0]
    return answer(setting, method, str(question), rounds, decode_s=seconds, tokens=tokens, **changes)


ROUNDS = [([0.7, 0.9], 2, 2), ([0.75, 0.5, 0.5], 0, 2), ([], 0, 2), ([1.0, 0.2], 1, 2)]
RECORDS = [
    record(BASELINE, 0, 4.0, 7),
    record(BASELINE, 1, 6.0, 13),
    record("failfast", 0, 1.0, 7, ROUNDS),
    record("failfast", 1, 3.0, 13, ROUNDS, output_ids=[2]),
]


def totals(records):
    return summary.totals(AnswerLog.of(records).frame())


def calibrated(*records):
    return plots.calibration(rounds_of(AnswerLog.of([RECORDS[0], *records]).frame()))


def test_totals():
    table = totals(RECORDS)
    assert table.tokens_per_s[BASELINE] == 2.0 and table.speedup[BASELINE] == 1.0
    row = table.loc["failfast"]
    assert (row.tokens_per_s, row.speedup, row.rounds_per_answer, row.passes_per_round) == (5.0, 2.5, 4.0, 2.0)
    assert [row[f"prompt_speedup.{name}"] for name in summary.SPREAD] == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert (row.max_accepted, row.max_drafted, row.acceptance_rate) == (2, 3, 6 / 14)
    assert (row.accepted_per_round, row.drafted_per_round, row.tau, row.verified_per_round) == (0.75, 1.75, 1.75, 2.75)
    assert (row[f"verdicts.{EQUAL}"], row[f"verdicts.{DIFFERENT}"]) == (1, 1)
    line = summary.nested(table)["failfast"]
    assert line["prompt_speedup"]["median"] == 3.0 and line["score"] is None and line["verdicts"][NEAR_TIE] == 0
    text = summary.cells(table)
    assert text["acceptance"].tolist() == ["-", "43%"] and text["speedup"].tolist() == ["1.00", "2.50"]
    assert text["accepted / speculated a round"]["failfast"] == "0.75 / 1.8"
    assert text["tokens a round"]["failfast"] == "1.75"


def test_tokens_accepted_after_the_end_are_not_counted():
    cut = record("lookup", 0, 1.0, 6, [([0.8] * 7, 7, 2), ([0.8] * 7, 7, 2)])
    cut["detail"][-1]["emitted"] = 2
    assert totals([RECORDS[0], cut]).accepted_per_round["lookup"] == (7 + 2) / 2
    assert calibrated(cut)[0].accepted[8] == 7.0


def test_of_repeats_the_median_counts():
    again = [answer | {"repeat": 1, "decode_s": 2.0} for answer in RECORDS]
    row = totals(RECORDS + again).loc["failfast"]
    # 4 s beside 1, and 6 beside 3; the second time 2 beside 2 for both.
    first, second = (4 / 1 + 2 / 2) / 2, (6 / 3 + 2 / 2) / 2
    spread = [row[f"prompt_speedup.{name}"] for name in ("median", "min", "max")]
    assert row.speedup == 14 / 8 and spread == [(first + second) / 2, second, first]


def test_calibration():
    """Judged: 0.7 and 0.9 accepted, 0.75 rejected (what follows it is not judged), 1.0 accepted, 0.2 rejected."""
    first, tokens, error, area = calibrated(RECORDS[2])
    assert first["count"].to_dict() == {7: 2, 9: 1} and tokens["count"].to_dict() == {2: 1, 7: 2, 9: 2}
    assert first.loc[7].tolist() == pytest.approx([0.725, 1, 2]) and first.loc[9].tolist() == [1, 1, 1]
    assert tokens.loc[7].tolist() == pytest.approx([0.725, 0.5, 2])
    assert error == pytest.approx((1 * 0.2 + 2 * abs(0.5 - 0.725) + 2 * abs(1.0 - 0.95)) / 5)
    assert area == pytest.approx(5 / 6)  # of 3 x 2 pairs, 0.7 and 0.75 are out of order


def test_without_drafts():
    assert np.isnan(totals([RECORDS[0], record("lookup", 0, 4.0, 2, [([], 0, 0)])]).acceptance_rate["lookup"])


def test_the_files_of_a_summary(tmp_path):
    """All three have the same figures; of a sweep the fastest point stands in the table."""
    rows = [Row(f"ar:spec_len={n}", "ar", {"spec_len": n}, "ar") for n in (2, 8)]
    records = [record(BASELINE, 0, 9.0, 9)]
    records += [record(row.label, 0, float(n), 9, [(n, n, 2)]) for row, n in zip(rows, (2, 8))]
    host = {"device": "cpu", "processor": "p", "cores": 2, "jax": "0", "python": "3", "date": "today"}
    models = {"target": "t", "drafter": None, "ar_drafter": "a"}
    about = {"machine": host, "models": models, "options": {}, "repeats": 1, "left_out": {"eagle3": "needs it"}}
    answers = AnswerLog.of(records).frame()
    text = summary.write_summary([Dataset("math500", (Question("0", "x"),))], rows, answers, about, tmp_path)
    assert text == (tmp_path / "summary.md").read_text() and "Left out: `eagle3` (needs it)." in text
    actual = json.loads((tmp_path / "summary.json").read_text())["datasets"]["math500"]
    assert actual["sweeps"] == {"ar": {"points": [row.label for row in rows], "best": "ar:spec_len=2"}}
    assert actual["rows"] == {BASELINE: BASELINE, "ar:spec_len=2": "ar (best: spec_len=2)"}
    assert "**ar:spec_len=2**" in text
    table = pd.read_csv(io.StringIO((tmp_path / "summary.csv").read_text()), index_col="setting")
    assert table.speedup.to_dict() == {label: row["speedup"] for label, row in actual["settings"].items()}
    assert table["prompt_speedup.median"]["ar:spec_len=8"] == 9 / 8


def test_easy_regions():
    rounds = ((3, 3, 4), (3, 1, 2), (0, 0, 1), (2, 2, 3), (4, 4, 2))
    answer = {"detail": [{"drafted": d, "accepted": a, "emitted": e} for d, a, e in rounds]}
    assert easy_tokens(answer) == [True] * 4 + [True, False] + [False] + [True] * 3 + [True] * 2
    assert easy_share([answer], [0, 4, 5, 9]) == [10 / 12, 10 / 12, 0.0, 0.0]


def test_figures_follow_from_records(tmp_path):
    """A draft of four, of which three agreed and two were within the answer."""
    entry = {"drafted": 4, "accepted": 3, "emitted": 2, "passes": 1, "confidence": [0.5] * 4}
    answers = [record(BASELINE, 0, 4.0, 2)]
    for tau, seconds in ((0.3, 2.0), (0.6, 1.0)):
        changes = {"options": {"tau": tau, "spec_len": 4}, "detail": [entry], "drafted": 4, "rounds": 1}
        answers.append(record(f"failfast:tau={tau}", 0, seconds, 2) | changes)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    run = plots.RunAnswers.read(tmp_path)
    first = [line.get_xydata().tolist() for line in plots.length_cdf(run).axes[0].lines][:2]
    assert [sorted({x for x, _ in line if np.isfinite(x)}) for line in first] == [[2.0], [4.0]]
    speedup, rate = (axis.lines[0].get_xydata().tolist() for axis in plots.sensitivity(run, "tau").axes)
    assert (speedup, rate) == ([[0.3, 2.0], [0.6, 4.0]], [[0.3, 0.5], [0.6, 0.5]])
    with pytest.raises(plots.NoData, match="no sweep over spec_len"):
        plots.sensitivity(run, "spec_len")


def test_other_samples_are_no_differences():
    """Rejection sampling promises `vanilla`'s distribution, not its tokens."""
    answers = [record(BASELINE, 0, 1.0, 2)]
    for label, ids, compared in (("same", [7, 7], False), ("sampled", [3], False), ("wrong", [3], True)):
        answers.append(record(label, 0, 1.0, 2, output_ids=ids, compared=compared))
    verdicts = AnswerLog.of(answers).frame().set_index("setting").verdict.to_dict()
    assert verdicts == {BASELINE: EQUAL, "same": EQUAL, "sampled": OTHER_SAMPLE, "wrong": DIFFERENT}
    assert promises_equality(GenerationConfig(temperature=0.7))
    assert not promises_equality(GenerationConfig(temperature=0.7, acceptance="rejection"))
