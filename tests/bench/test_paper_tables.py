"""The paper's averages, tables, claims and modelled speedups, from a few records, by hand."""

import numpy as np
import pandas as pd
import pytest
from checkpoint_files import GOLDEN
from paper_records import answer

from failfast_jax.bench.answer_log import AnswerLog
from failfast_jax.bench.paper import averages, extension, reproduction
from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS, parse_latency
from failfast_jax.bench.plots import auroc

DOCS = GOLDEN.parents[2] / "docs"
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


def paper_run(records=RECORDS, target="Qwen2.5-32B-Instruct"):
    return averages.read_run(AnswerLog.of(records).frame(), target, parse_latency("1:10"))


def lines(text) -> list[list[str]]:
    """Cells of a table's lines, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def claimed(*runs) -> dict[str, list[str]]:
    """Claims by their text: ours, and the paper's."""
    return {text: rest for text, *rest in lines(reproduction.claims_table(runs))}


def ratio(run, row, other):
    means = run.means.modelled
    return (means[row] / means[other]).to_dict()


def test_rows_are_the_papers():
    assert paper_run().chosen["math500"] == {
        AR: "ar:spec_len=4",
        FAST_DLLM: "fast-dllm:spec_len=4",  # at the length that is best for AR
        FAST_DLLM_PLUS: "fast-dllm:spec_len=8",
        FAILFAST: "failfast",
        "wide": "wide",
    }


def test_averages_are_over_questions():
    run = paper_run()
    actual, sums = run.means.loc[FAILFAST, "math500"], run.pooled.loc[FAILFAST, "math500"]
    assert actual.acceptance == pytest.approx((10 / 30 + 5 / 10) / 2) and sums.acceptance == 15 / 40
    assert (actual.accepted, actual.speculated, actual.passes) == (5.0, 12.5, 2.25)
    assert actual.measured == pytest.approx((3 + 1.5) / 2) and sums.measured == 2.0
    assert actual.modelled == pytest.approx((120 / 25 + 60 / 12) / 2)
    assert (actual.most_accepted, actual.most_speculated) == (10, 20)
    table = lines(averages.details(run))
    assert [FAILFAST, "Acceptance rate, %", "41.7 (40.6)", "41.7 (40.6)"] in table
    assert [FAILFAST, "Acceptance rate, %, pooled", "37.5 (40.6)", "37.5 (40.6)"] in table
    assert [FAILFAST, "Max speculated length", "20 (70)", "-"] in table
    assert [FAILFAST, "modelled, mean of questions", "4.90 (4.94)", "4.90 (4.94)"] in lines(averages.speedups(run))
    assert ["wide", "measured", "0.38", "0.38"] in lines(averages.ratios(run))


def test_rows_are_compared_over_the_same_questions():
    """Of a killed run: `failfast` lacks question b, and `wide` all of it; of another dataset only a row has begun."""
    late = [r for r in RECORDS if (r["setting"], r["question"]) != ("failfast", "b")]
    other = [{**r, "dataset": "gsm8k"} for r in RECORDS if r["setting"] in ("vanilla", "wide") and r["question"] == "a"]
    run = paper_run([*late, *other])
    assert run.answered == {"math500": (1, 2), "gsm8k": (1, 1)}
    # Question a alone: 12 and 9 tokens in two rounds each. No average over one dataset of two.
    assert ratio(run, FAILFAST, AR) == {"math500": pytest.approx((120 / 25) / (90 / 28))}
    assert averages.by_dataset(run, run.means, "modelled").loc[AR].isna().tolist() == [False, True, True]
    assert not averages.by_dataset(run, run.means, "modelled").loc["wide"].isna().any()
    none = [r for r in RECORDS if r["setting"] == "vanilla"]
    none += [r for r in RECORDS if (r["setting"], r["question"]) in (("wide", "a"), ("failfast", "b"))]
    with pytest.raises(ValueError, match="x: no question was answered by all rows yet"):
        paper_run(none, "x")


def test_of_several_with_one_length_the_best_stands_for_it():
    fast = [r for r in RECORDS if r["method"] == "fast-dllm"]
    slow = [{**r, "setting": f"{r['setting']},threshold=1"} for r in fast]
    slow = [{**r, "detail": [{**entry, "passes": 99} for entry in r["detail"]]} for r in slow]
    for both in ([*RECORDS, *slow], [*slow, *RECORDS]):
        assert not any("threshold=1" in label for label in paper_run(both).chosen["math500"].values())


def test_claims_of_rows_that_are_missing_are_empty():
    alone = [r for r in RECORDS if r["setting"] in ("vanilla", "wide")]
    assert {ours for ours, _ in claimed(paper_run(alone)).values()} == {"-"}


def test_claims_follow_from_appendix_b():
    """Its figures are rounded: latencies fall by 22.9, 41.1 and 17.1 % in the text."""
    runs = [paper_run(target=f"Qwen2.5-{size}-Instruct") for size in ("32B", "14B")]
    claims_of_paper = claimed(*(run._replace(means=run.published.assign(measured=np.nan)) for run in runs))
    expected = {
        "... Qwen2.5-32B": "3.16 to 4.94",
        "FailFast over the AR drafter": "1.33 to 1.93",
        "FailFast over Fast-dLLM": "1.20 to 1.60",
        "speculation latency, Fast-dLLM below AR": "22.2 %",
        "... FailFast below Fast-dLLM": "41.0 %",
        "verification latency, FailFast below AR": "17.4 %",
        "tokens a pass, FailFast": "4.06 / 4.03",
        "rounds fewer than with the AR drafter": "16.0 % / 23.2 %",
        "longest accepted draft": "70.00 / 60.00",
    }
    assert {text: claims_of_paper[text][0] for text in expected} == expected
    assert averages.published_of("SmolLM2-135M").empty


def test_rows_of_a_sweep_stand_beside_the_presets():
    """Appendix C's points have the released schedule, too, and so may come first in the records."""
    point = answer("failfast:tau=0.3", "failfast", "a", [(10, 1, 2)], {"schedule": "aligned", "tau": 0.3})
    chosen = paper_run([point, *RECORDS], "x").chosen["math500"]
    assert (chosen[FAILFAST], chosen["failfast:tau=0.3"]) == ("failfast", "failfast:tau=0.3")
    assert paper_run([RECORDS[0], point], "x").chosen["math500"] == {FAILFAST: "failfast:tau=0.3"}


def test_algorithm_1_in_a_run_without_math():
    """The preset `smollm2-diffusion`: its row is the method; where MATH is missing claims are about every dataset."""
    own = answer("failfast", "failfast", "a", [(12, 6, 2)], {"schedule": "wide"})
    other = answer("failfast", "failfast", "a", [(8, 2, 4)], {"schedule": "wide"})
    questions = [{**record, "dataset": name} for name, record in (("humaneval", own), ("mtbench", other))]
    run = paper_run([*(RECORDS[0] | {"dataset": name} for name in ("humaneval", "mtbench")), *questions], "x")
    assert run.chosen["humaneval"] == run.chosen["mtbench"] == {FAILFAST: "failfast"}
    claims = claimed(run, paper_run())
    assert claims["tokens a pass, FailFast"] == ["HumanEval 6.00 / mtbench 2.00 / 5.56", "4.1 (MATH)"]
    assert claims["longest accepted draft"] == ["HumanEval 6.00 / mtbench 2.00 / 10.00", "70 (MATH)"]


def test_the_kept_records_give_the_figures_of_the_page():
    """The column of HumanEval in `docs/reproduce-the-paper.md`, as far as the kept rows have it."""
    run = reproduction.read_run(DOCS / "claims", "0.83:2.73", within_answer=True)
    rows = [line.split("|") for line in (DOCS / "reproduce-the-paper.md").read_text().splitlines()]
    page = {row[1].strip(): row[3].strip() for row in rows if len(row) == 7}
    figures = next(dict(zip(extension.COLUMNS, row[2:])) for row in lines(run.extension) if row[1] == "failfast")
    means = run.means.loc[FAILFAST, "humaneval"]
    assert page["speedup, modelled"] == f"{means.modelled:.2f}"
    assert page["speedup, here: FailFast, Fast-dLLM, autoregressive"].split(",")[0] == f"{means.measured:.2f}"
    assert page["confidence ranks right tokens first: AUROC"] == figures["AUROC"]
    assert page["rounds that are extended"] == figures["extended rounds, %"] + " %"
    first = "{accepted in their first chunk}, {accepted in others' first chunk}".format_map(figures)
    assert page["right in the first chunk of 3: extended rounds, others"] == first
    assert page["accepted in extended rounds"] == figures["accepted in them"]
    assert page["... in all (95 % interval)"] == "{accepted a round} ({from} to {to})".format_map(figures)
    assert page["... in all, mean of questions"] == f"{means.accepted:.1f}"
    assert page["accepted a pass: FailFast, autoregressive"].split(",")[0] == f"{means.accepted / means.passes:.2f}"
    assert page["longest accepted draft"] == f"{means.most_accepted:.0f}"
    looked_up = page["of tokens accepted in extended drafts, what `lookup` has"]
    assert looked_up == figures["of these a lookup has, %"] + " %"


def test_a_pass_of_eagle_has_no_price():
    """The authors' latency of a pass is that of a model of 1.5B; EAGLE-3 was timed."""
    rows = [answer("eagle3", "eagle3", q, [(8, 4, 8)], {}, decode_s=s) for q, s in (("a", 3.0), ("b", 2.0))]
    run = paper_run([*RECORDS, *rows])
    actual = run.means.loc["eagle3", "math500"]
    assert np.isnan([actual.modelled, actual.draft_ms, run.pooled.modelled["eagle3", "math500"]]).all()
    assert actual.measured == 2.5 and ["eagle3", "modelled", "-", "-"] in lines(averages.ratios(run))
    actual = claimed(run, paper_run())["FailFast over EAGLE-3, measured, mean"]
    assert actual[0] == "0.90 to 0.90"  # 2.25 over 2.5


def test_tokens_past_the_end_of_an_answer():
    """Of 9 accepted tokens the answer has room for 4, and for none of the target's own."""
    last = answer("failfast", "failfast", "a", [(10, 9, 2)], tokens=4)
    last["detail"][0]["emitted"] = 4
    frame = AnswerLog.of([answer("vanilla", "vanilla", "a", []), last]).frame()
    for within_answer, accepted, tokens in ((False, 9, 10), (True, 4, 4)):
        actual = averages.sums_of(frame, within_answer).iloc[0]
        assert (actual.accepted, actual.most_accepted, actual.tokens) == (accepted, accepted, tokens)


def test_latencies():
    assert parse_latency("14B").target_step == 24.7
    assert averages.latency_for("models/qwen2.5-7b-instruct-4bit").target_step == 13.5
    assert averages.latency_for(None).target_step == 52.6
    for text in ("8B", "0:0", "1", "-1:5", "a:b"):
        with pytest.raises(ValueError, match=f"--modelled {text}: must be DRAFT:TARGET"):
            parse_latency(text)


def test_what_confidence_and_repetition_say_of_drafts_that_grow():
    confidence, right = pd.Series([0.9, 0.7, 0.6, 0.2]), pd.Series([True, False, True, False])
    assert auroc(confidence, right) == 0.75
    assert np.isnan(auroc(confidence, right | True))
    assert extension.looked_up([1, 2, 3, 4, 1, 2], 6, 3) == [3, 4, 1]
    assert extension.looked_up([1, 2, 3, 4, 5], 5, 3) == []
    rounds = [([0.9, 0.8, 0.3], 2, 1), ([0.4], 0, 1), ([0.7], 1, 1), ([], 0, 1)]
    drafter = {"kind": "other", "grows": True, "spec_len": 1}
    texts = {"prompt_ids": [1, 2, 3, 4, 1, 2], "prompt_tokens": 6, "output_ids": [3, 4, 9, 8, 7, 6, 5]}
    grown = answer("failfast", "failfast", "q", rounds, drafter=drafter, **texts)
    fixed = answer("fixed", "failfast", "q", rounds, drafter=drafter | {"grows": False}, **texts)
    frame = AnswerLog.of([answer("vanilla", "vanilla", "q", []), grown, fixed]).frame()
    # Right .9 .8 .7, wrong .3 .4. Of three drafts one is extended: 3 tokens, of which the target takes 2, as a lookup
    # would. Of the other two one has its only token right.
    same = ["1", "1.7", "1.00", "1.00", "1.00", "1.000"]
    expected = [["math500", "failfast", *same, "33.3", "3.0", "2.00", "100", "1.00", "0.50", "0"]]
    expected += [["math500", "fixed", *same, "0.0", "-", "-", "-", "-", "-", "0"]]
    assert lines(extension.extension_table(frame)) == expected
    # A chunk of 2 that reuse made longer: the second draft's last token is one that the first round rejected.
    reused = answer("r", "failfast", "q", [(4, 0, 2), (3, 0, 1)], {"reuse": True}, drafter=drafter | {"spec_len": 2})
    for entry, ids in zip(reused["detail"], ([1, 2, 3, 4], [2, 3, 4])):
        entry["ids"] = ids
    assert [line["extended"] for line in extension.rounds_of_answer(reused)] == [True, False]
    rounds = pd.DataFrame({"question": [*"aaab"], "accepted": [1, 2, 3, 10]})
    assert extension.interval(rounds) == (2.0, 10.0)  # both of one question in more than 2.5 % of the draws
