"""The paper's averages, tables and claims from a few records, by hand."""

import numpy as np
import pytest
from paper_records import answer

from failfast_jax.bench.paper import averages, claims
from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS
from failfast_jax.bench.speedup_model import parse_latency

RECORDS = [
    *(answer("vanilla", "vanilla", q, [], decode_s=6.0) for q in "ab"),
    answer("ar:spec_len=4", "ar", "a", [(4, 4, 4), (4, 3, 4)], {"spec_len": 4}),
    answer("ar:spec_len=4", "ar", "b", [(4, 2, 4)], {"spec_len": 4}),
    *(answer("ar:spec_len=8", "ar", q, [(8, 1, 8)], {"spec_len": 8}) for q in "ab"),
    *(answer("fast-dllm:spec_len=4", "fast-dllm", q, [(4, 3, 3)], {"spec_len": 4}) for q in "ab"),
    *(answer("fast-dllm:spec_len=8", "fast-dllm", q, [(8, 6, 3)], {"spec_len": 8}) for q in "ab"),
    answer("failfast", "failfast", "a", [(10, 10, 2), (20, 0, 3)], {"schedule": "aligned"}, decode_s=2.0),
    answer("failfast", "failfast", "b", [(10, 5, 2)], {"schedule": "aligned"}, decode_s=4.0),
    *(answer("wide", "failfast", q, [(10, 5, 1)], {"schedule": "wide"}) for q in "ab"),
]


def paper_run():
    return averages.run_of(RECORDS, "Qwen2.5-32B-Instruct", parse_latency("1:10"))


def test_rows_are_the_papers():
    chosen = paper_run().chosen["math500"]
    assert chosen == {
        AR: "ar:spec_len=4",
        FAST_DLLM: "fast-dllm:spec_len=4",  # at the length that is best for AR
        FAST_DLLM_PLUS: "fast-dllm:spec_len=8",
        FAILFAST: "failfast",
        "wide": "wide",
    }


def test_averages_are_over_questions():
    answers = paper_run().rows["math500"][FAILFAST]
    found, sums = averages.averaged(answers), averages.pooled(answers)
    assert found["acceptance"] == pytest.approx((10 / 30 + 5 / 10) / 2) and sums["acceptance"] == 15 / 40
    assert (found["accepted"], found["speculated"], found["passes"]) == (5.0, 12.5, 2.25)
    assert found["measured"] == pytest.approx((3 + 1.5) / 2) and sums["measured"] == 2.0
    assert found["modelled"] == pytest.approx((120 / 25 + 60 / 12) / 2)
    assert (found["most_accepted"], found["most_speculated"]) == (10, 20)
    text = averages.details(paper_run())
    assert "| FailFast | Acceptance rate, % | 41.7 (40.6) | 41.7 (40.6) |" in text
    assert "| FailFast | Acceptance rate, %, pooled | 37.5 (40.6)" in text
    assert "| FailFast | Max speculated length | 20 (70) | - |" in text
    assert "| FailFast | modelled, mean of questions | 4.90 (4.94)" in averages.speedups(paper_run())


def test_rows_are_compared_over_the_same_questions(tmp_path, capsys):
    """Of a killed run: `failfast` lacks question b, and `wide` all of it; of another dataset only a row has begun."""
    late = [r for r in RECORDS if (r["setting"], r["question"]) != ("failfast", "b")]
    other = [{**r, "dataset": "gsm8k"} for r in RECORDS if r["setting"] in ("vanilla", "wide") and r["question"] == "a"]
    run = averages.run_of([*late, *other], "Qwen2.5-32B-Instruct", parse_latency("1:10"))
    assert run.paired == {"math500": 1, "gsm8k": 1} and run.lacking["math500"] == {"failfast": 1}
    assert set(run.lacking["gsm8k"]) == set(run.chosen["math500"].values()) - {"wide"} | {
        f"{method}:spec_len=8" for method in ("ar", "fast-dllm")
    }
    assert {a.record["question"] for rows in run.rows["math500"].values() for a in rows} == {"a"}
    # Question a alone: 12 and 9 tokens in two rounds each. No average over one dataset of two.
    assert averages.over(run, FAILFAST, AR, "modelled")[0] == pytest.approx((120 / 25) / (90 / 28))
    assert averages.over(run, FAILFAST, AR, "modelled")[1:] == [None, None]
    assert averages.over(run, "wide", "wide", "modelled") == [1.0, 1.0, 1.0]
    none = [r for r in RECORDS if (r["setting"], r["question"]) not in (("failfast", "a"), ("wide", "b"))]
    none = [
        r for r in none if r["setting"] in ("vanilla", "wide") or (r["setting"], r["question"]) == ("failfast", "b")
    ]
    with pytest.raises(ValueError, match="x: no question was answered by all rows yet"):
        averages.run_of(none, "x", parse_latency("1:10"))


def test_of_several_with_one_length_the_best_stands_for_it():
    fast = [r for r in RECORDS if r["method"] == "fast-dllm"]
    slow = [{**r, "setting": f"{r['setting']},threshold=1"} for r in fast]
    slow = [{**r, "detail": [{**entry, "passes": 99} for entry in r["detail"]]} for r in slow]
    for both in ([*RECORDS, *slow], [*slow, *RECORDS]):
        run = averages.run_of(both, "Qwen2.5-32B-Instruct", parse_latency("1:10"))
        assert not any("threshold=1" in label for label in run.chosen["math500"].values())


def cells(runs) -> dict[str, list[str]]:
    """Claims by their text: ours, and the paper's."""
    lines = [line.strip("| ").split(" | ") for line in claims.claims_table(runs).splitlines()[2:]]
    return {text: rest for text, *rest in lines}


def test_claims():
    found = cells([paper_run()])
    assert found["tokens a pass, FailFast, MATH"] == ["5.56", "4.1"]
    assert found["rounds fewer than with the AR drafter, MATH"] == ["0.0 %", "16.0 %"]
    assert found["speculation latency, Fast-dLLM below AR"] == ["50.0 %", "22.9 %"]  # 3 against 8 and 4
    assert found["... Qwen2.5-32B"] == ["4.90 to 4.90", "3.1 to 4.9"]
    assert found["longest accepted draft, MATH"][0] == "10.00"
    assert {ours for ours, _ in cells([]).values()} == {"-"}


def test_claims_follow_from_appendix_b():
    """Its own figures are rounded: latencies fall by 22.9, 41.1 and 17.1 % in the text."""
    datasets = averages.DATASET_NAMES
    runs = [averages.PaperRun(f"Qwen2.5-{size}-Instruct", {}, {}) for size in ("32B", "14B")]
    for row, other, name, paper in (
        (FAST_DLLM, AR, "draft_ms", 22.9),
        (FAILFAST, FAST_DLLM, "draft_ms", 41.1),
        (FAILFAST, AR, "verify_ms", 17.1),
    ):
        sums = [[sum(run.published(d, r)[name] for d in datasets) for r in (row, other)] for run in runs]
        assert 100 * np.mean([1 - ours / theirs for ours, theirs in sums]) == pytest.approx(paper, abs=0.8)
    speedups = {
        r: [[run.published(d, r)["modelled"] for d in datasets] for run in runs] for r in (AR, FAST_DLLM, FAILFAST)
    }
    assert speedups[FAILFAST][0][0] == pytest.approx(4.94, abs=0.005) and 3.1 <= min(speedups[FAILFAST][0])
    for row, low, high in ((AR, 1.25, 2.1), (FAST_DLLM, 1.15, 1.7)):
        ratios = np.divide(speedups[FAILFAST], speedups[row])
        assert low < ratios.min() and ratios.max() < high


def test_rows_of_a_sweep_stand_beside_the_presets():
    """Appendix C's points have the released schedule, too, and so may come first in the records."""
    point = answer("failfast:tau=0.3", "failfast", "a", [(10, 1, 2)], {"schedule": "aligned", "tau": 0.3})
    run = averages.run_of([point, *RECORDS], "x", parse_latency("1:10"))
    assert run.chosen["math500"][FAILFAST] == "failfast"
    assert run.chosen["math500"]["failfast:tau=0.3"] == "failfast:tau=0.3"
    alone = averages.run_of([RECORDS[0], point], "x", parse_latency("1:10"))
    assert alone.chosen["math500"] == {FAILFAST: "failfast:tau=0.3"}


def test_a_pass_of_eagle_has_no_price():
    """The authors' latency of a pass is that of a model of 1.5B; EAGLE-3 was timed."""
    rows = [answer("eagle3", "eagle3", q, [(8, 4, 8)], {}, decode_s=s) for q, s in (("a", 3.0), ("b", 2.0))]
    run = averages.run_of([*RECORDS, *rows], "Qwen2.5-32B-Instruct", parse_latency("1:10"))
    found = averages.averaged(run.rows["math500"]["eagle3"])
    assert (found["modelled"], found["draft_ms"], found["measured"]) == (None, None, 2.5)
    assert averages.pooled(run.rows["math500"]["eagle3"])["modelled"] is None
    assert cells([run, paper_run()])["FailFast over EAGLE-3, measured, mean"][0] == "0.90 to 0.90"  # 2.25 over 2.5
    assert "| eagle3 | modelled | - | - |" in averages.ratios(run)
