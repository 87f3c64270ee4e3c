"""The paper's averages, tables and claims from a few records, by hand."""

from pathlib import Path

import pytest
from paper_records import answer

from failfast_jax.bench import paper, paper_claims, paper_tables
from failfast_jax.bench.journal import planned
from failfast_jax.bench.modelled import parse_latency
from failfast_jax.bench.paper_tables import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS
from failfast_jax.errors import ConfigError

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


def paper_run(released=False):
    return paper_tables.run_of(RECORDS, "Qwen2.5-32B-Instruct", parse_latency("1:10"), released=released)


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
    found, sums = paper_tables.averaged(answers), paper_tables.pooled(answers)
    assert found["acceptance"] == pytest.approx((10 / 30 + 5 / 10) / 2) and sums["acceptance"] == 15 / 40
    assert (found["accepted"], found["speculated"], found["passes"]) == (5.0, 12.5, 2.25)
    assert found["measured"] == pytest.approx((3 + 1.5) / 2) and sums["measured"] == 2.0
    assert found["modelled"] == pytest.approx((120 / 25 + 60 / 12) / 2)
    assert (found["most_accepted"], found["most_speculated"]) == (10, 20)
    text = paper_tables.details(paper_run())
    assert "| FailFast | Acceptance rate, % | 41.7 (40.6) | 41.7 (40.6) |" in text
    assert "| FailFast | Acceptance rate, %, pooled | 37.5 (40.6)" in text
    assert "| FailFast | Max speculated length | 20 (70) | - |" in text
    assert "| FailFast | modelled, mean of questions | 4.90 (4.94)" in paper_tables.speedups(paper_run())


def test_rows_are_compared_over_the_same_questions(tmp_path, capsys):
    """Of a killed run: `failfast` lacks question b, and `wide` all of it; of another dataset only a row has begun."""
    late = [r for r in RECORDS if (r["setting"], r["question"]) != ("failfast", "b")]
    other = [{**r, "dataset": "gsm8k"} for r in RECORDS if r["setting"] in ("vanilla", "wide") and r["question"] == "a"]
    run = paper_tables.run_of([*late, *other], "Qwen2.5-32B-Instruct", parse_latency("1:10"), released=False)
    assert run.paired == {"math500": 1, "gsm8k": 1} and run.behind["math500"] == {"failfast": 1}
    assert set(run.behind["gsm8k"]) == set(run.chosen["math500"].values()) - {"wide"} | {
        f"{method}:spec_len=8" for method in ("ar", "fast-dllm")
    }
    assert {a.record["question"] for rows in run.rows["math500"].values() for a in rows} == {"a"}
    # Question a alone: 12 and 9 tokens in two rounds each. No average over one dataset of two.
    assert paper_tables.over(run, FAILFAST, AR, "modelled")[0] == pytest.approx((120 / 25) / (90 / 28))
    assert paper_tables.over(run, FAILFAST, AR, "modelled")[1:] == [None, None]
    assert paper_tables.over(run, "wide", "wide", "modelled") == [1.0, 1.0, 1.0]
    none = [r for r in RECORDS if (r["setting"], r["question"]) not in (("failfast", "a"), ("wide", "b"))]
    none = [
        r for r in none if r["setting"] in ("vanilla", "wide") or (r["setting"], r["question"]) == ("failfast", "b")
    ]
    with pytest.raises(ValueError, match="x: no question was answered by all rows yet"):
        paper_tables.run_of(none, "x", parse_latency("1:10"), released=False)


def test_of_several_with_one_length_the_best_stands_for_it():
    fast = [r for r in RECORDS if r["method"] == "fast-dllm"]
    slow = [{**r, "setting": f"{r['setting']},threshold=1"} for r in fast]
    slow = [{**r, "detail": [{**entry, "passes": 99} for entry in r["detail"]]} for r in slow]
    for both in ([*RECORDS, *slow], [*slow, *RECORDS]):
        run = paper_tables.run_of(both, "Qwen2.5-32B-Instruct", parse_latency("1:10"), released=False)
        assert not any("threshold=1" in label for label in run.chosen["math500"].values())


def test_what_was_planned():
    """Of a dataset without an answer, and of questions that no row has reached: the most that a session meant."""
    head = {"kind": "run", "session": 0}
    lines = [{**head, "plan": {"math500": {"failfast": 3, "wide": 2}}}, head, {"kind": "answer", "plan": None}]
    lines.append({**head, "plan": {"math500": {"failfast": 2}, "gsm8k": {"wide": 2}}})
    plan = planned(Path("x"), lines)
    assert plan == {"math500": {"failfast": 3, "wide": 2}, "gsm8k": {"wide": 2}}
    given = "Qwen2.5-32B-Instruct", parse_latency("1:10")
    run = paper_tables.run_of(RECORDS, *given, released=False, planned=plan)
    assert run.behind == {"math500": {"failfast": 1}} and run.waiting == {"gsm8k": ["wide"]}
    behind, waiting = paper.unfinished(run)
    assert behind.endswith("the 2 answers that every row there has; answers that rows lack: failfast (1).")
    assert waiting == "Qwen2.5-32B-Instruct, gsm8k: unfinished, no row has begun."
    for wrong in ([], {"math500": 3}, {"math500": {"wide": None}}):
        with pytest.raises(ConfigError, match="x: a line of kind run has a plan that is none"):
            planned(Path("x"), [{**head, "plan": wrong}])


def test_claims():
    lines = [line.strip("| ").split(" | ") for line in paper_claims.table([paper_run()]).splitlines()[2:]]
    found = {cells[0]: cells[1:] for cells in lines}
    assert found["tokens a pass, FailFast, MATH"] == ["5.56", "4.1", "4.06"]
    assert found["rounds fewer than with the AR drafter, MATH"] == ["0.0 %", "16.0 %", "16.0 %"]
    assert found["speculation latency, Fast-dLLM below AR"][0] == "50.0 %"  # 3 against 8 and 4
    assert found["... Fast-dLLM below AR"][1:] == ["near 0", "1.1 %"]
    assert found["... Qwen2.5-32B"] == ["4.90 to 4.90", "3.1 to 4.9", "3.16 to 4.94"]
    assert found["Theorem 3.8, AR drafter: most, at length"][1:] == ["3.0 at 8", "2.9 at 8"]
    assert found["... FailFast"][1:] == ["5.2 at 16", "5.3 at 16"]
    # Drafts of 12.5 tokens at a rate of 41.7 %: 0.86 are right, token by token; a pass costs a tenth of a step.
    assert found["... FailFast"][0] == "5.1 at 16"
    # Appendix B's own figures are rounded: 22.9, 41.1 and 17.1 in the text.
    own = paper_claims.from_appendix()
    assert [float(own[name].split()[0]) for name in list(own)[:3]] == pytest.approx([22.9, 41.1, 17.1], abs=0.8)
    assert "| - |" in paper_claims.table([])


def test_rows_of_a_sweep_stand_beside_the_presets():
    """Appendix C's points have the released schedule, too, and so may come first in the records."""
    point = answer("failfast:tau=0.3", "failfast", "a", [(10, 1, 2)], {"schedule": "aligned", "tau": 0.3})
    run = paper_tables.run_of([point, *RECORDS], "x", parse_latency("1:10"), released=False)
    assert run.chosen["math500"][FAILFAST] == "failfast"
    assert run.chosen["math500"]["failfast:tau=0.3"] == "failfast:tau=0.3"
    alone = paper_tables.run_of([RECORDS[0], point], "x", parse_latency("1:10"), released=False)
    assert alone.chosen["math500"] == {FAILFAST: "failfast:tau=0.3"}


def test_a_pass_of_eagle_has_no_price():
    """The authors' latency of a pass is that of a model of 1.5B; EAGLE-3 was timed."""
    rows = [answer("eagle3", "eagle3", q, [(8, 4, 8)], {}, decode_s=s) for q, s in (("a", 3.0), ("b", 2.0))]
    run = paper_tables.run_of([*RECORDS, *rows], "Qwen2.5-32B-Instruct", parse_latency("1:10"), released=False)
    found = paper_tables.averaged(run.rows["math500"]["eagle3"])
    assert (found["modelled"], found["draft_ms"], found["measured"]) == (None, None, 2.5)
    assert paper_tables.pooled(run.rows["math500"]["eagle3"])["modelled"] is None
    lines = [line.strip("| ").split(" | ") for line in paper_claims.table([run, paper_run()]).splitlines()[2:]]
    claims = {cells[0]: cells[1] for cells in lines}
    assert claims["FailFast over EAGLE-3, measured, a target's mean"] == "0.90 to 0.90"  # 2.25 over 2.5
    assert "| eagle3 | modelled | - | - |" in paper_tables.ratios(run)
    # Of chains, only the long ones.
    long = [
        answer(f"eagle3:spec_len={n}", "eagle3", q, [(n, 4, n)], {"spec_len": n}, decode_s=s)
        for n, s in ((8, 3.0), (60, 12.0))
        for q in "ab"
    ]
    run = paper_tables.run_of([*RECORDS, *rows, *long], "x", parse_latency("1:10"), released=False)
    text = "| EAGLE-3, chains of 50 to 60, over vanilla, measured | 0.50 to 0.50 | a slowdown | - |"
    assert text in paper_claims.table([run])


def test_long_drafts_of_the_ar_drafter():
    """60 tokens in 60 passes: 60 x 1 + 10 ms a round that emits 5 tokens, 10 ms each without drafts."""
    rows = [
        answer(f"ar:spec_len={n}", "ar", q, [(n, 4, n)], {"spec_len": n}, decode_s=1.0) for n in (8, 60) for q in "ab"
    ]
    run = paper_tables.run_of([*RECORDS, *rows], "x", parse_latency("1:10"), released=False)
    text = "| AR drafter, drafts of 50 to 60, over vanilla | 0.71 to 0.71 | a slowdown | - |"
    assert text in paper_claims.table([run])
