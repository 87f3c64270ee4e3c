"""Rows for the paper's appendices C to F, each against a few records of which it can be told by hand."""

import pytest
from paper_records import answer

from failfast_jax.bench import paper_appendix, paper_claims, paper_tables
from failfast_jax.bench.modelled import parse_latency

ALIGNED = {"schedule": "aligned", "tau": 0.45, "max_spec_len": 60}


def run_of(*records):
    """A run with these answers; a drafter pass costs a tenth of a step."""
    plain = [answer("vanilla", "vanilla", q, [], decode_s=6.0) for q in dict.fromkeys(r["question"] for r in records)]
    return paper_tables.run_of([*plain, *records], "Qwen2.5-32B-Instruct", parse_latency("1:10"), released=False)


def claims(run):
    """What was found, by claim."""
    lines = [line.strip("| ").split(" | ") for line in paper_claims.table([run]).splitlines()[2:]]
    return {cells[0]: cells[1] for cells in lines}


def test_sweeps_of_tau_and_the_longest_draft():
    def point(rounds, **options):
        label = ",".join(f"{key}={value}" for key, value in options.items())
        return answer(f"failfast:{label}", "failfast", "a", rounds, {**ALIGNED, **options})

    run = run_of(
        point([(10, 10, 2)], tau=0.45),  # 11 tokens in 12 units: 9.17
        point([(10, 5, 2)], tau=0.7),  # 6 in 12: 5
        point([(60, 10, 12)], tau=0.1),  # 11 in 22: 5
        point([(10, 0, 2)], max_spec_len=10),
        point([(30, 10, 3)], max_spec_len=30),  # 11 in 13
        point([(10, 10, 2)], max_spec_len=60),
        answer("reuse", "failfast", "a", [(10, 10, 1)], {**ALIGNED, "reuse": True, "tau": 0.8}),
        answer("wide", "failfast", "a", [(10, 10, 1)], {"schedule": "wide", "tau": 0.9}),
    )
    assert set(paper_appendix.points(run, "tau")) == {0.45, 0.7, 0.1}
    assert set(paper_appendix.points(run, "max_spec_len")) == {10, 30, 60}
    found = claims(run)
    assert found["MATH, tau 0.45 over the best tau"] == "1.00"
    assert found["... 0.7"] == found["... 0.1"] == "0.55"  # 6 / 11
    assert found["... N_max of 30 to 70, worst over best"] == "0.92"  # 12 / 13
    alone = claims(run_of(point([(10, 10, 2)], tau=0.45), point([(10, 10, 2)], max_spec_len=10)))
    assert {alone["MATH, tau 0.45 over the best tau"], alone["... N_max of 30 to 70, worst over best"]} == {"-"}


def test_eagles_tree_and_its_chains():
    tree = {"tree_depth": 7, "tree_top_k": 10, "tree_budget": 59}
    records = [answer("eagle3", "eagle3", "a", [(8, 4, 8), (7, 4, 8)], tree, decode_s=2.0)]
    records[0]["detail"] = [{**entry, "nodes": nodes} for entry, nodes in zip(records[0]["detail"], (60, 57))]
    none = dict.fromkeys(tree)
    for length, seconds in ((3, 4.0), (20, 3.0), (50, 1.0)):  # 50: not of those that are compared
        options = {**none, "spec_len": length}
        records.append(answer(f"eagle3:spec_len={length}", "eagle3", "a", [(length, 4, 8)], options, decode_s=seconds))
    found = claims(run_of(*records))
    assert found["... best chain of 3 to 20 over its tree, measured"] == "0.67 to 0.67"
    assert found["... largest tree, tokens; depth"] == "60; 8"
    assert found["EAGLE-3 trained further, over the row eagle3, measured"] == "-"
    further = answer("eagle3:drafter=later", "eagle3", "a", [(8, 4, 8)], {**tree, "drafter": "later"}, decode_s=1.6)
    assert (
        claims(run_of(records[0], further))["EAGLE-3 trained further, over the row eagle3, measured"] == "1.25 to 1.25"
    )
    found = claims(run_of(*records[:1]))
    assert found["... best chain of 3 to 20 over its tree, measured"] == "-"


def test_easiness_across_rounds():
    """Right and wrong in turn: -1. Two right, two wrong: each is followed by right-right, right-wrong, wrong-wrong."""
    turns = answer("failfast", "failfast", "a", [(10, 10, 1), (10, 0, 1), (10, 10, 1), (10, 0, 1)], ALIGNED)
    halves = answer("failfast", "failfast", "b", [(10, 10, 1), (10, 10, 1), (10, 0, 1), (10, 0, 1)], ALIGNED)
    short = answer("failfast", "failfast", "c", [(10, 10, 1), (10, 10, 1)], ALIGNED)
    for entry, confidence in zip(turns["detail"], (0.9, 0.1, 0.9, 0.1)):
        entry["confidence"] = [confidence] * 10
    run = run_of(turns, halves, short)
    assert list(paper_appendix.carried_over(run)) == pytest.approx([(-1 + 0.5) / 2])
    assert list(paper_appendix.confidence_tells(run)) == pytest.approx([1.0])  # of the others it never changes
    found = claims(run)
    assert found["FailFast, correlation of a round's acceptance rate with the last one's"] == "-0.25 to -0.25"
    assert found["... with the mean confidence of its draft"] == "1.00 to 1.00"
    assert list(paper_appendix.carried_over(run_of(short))) == []


def test_the_example_has_its_longest_drafts():
    rounds = [(10, 3, 3)] * 3 + [(30, 18, 7)] + [(10, 9, 3)] * 8 + [(60, 60, 11)]
    records = [answer("failfast", "failfast", q, rounds, ALIGNED) for q in ("q1", paper_appendix.EXAMPLE)]
    lines = paper_appendix.longest_drafts([run_of(*records), run_of(*records[:1])]).splitlines()
    assert lines[2] == "| paper, Qwen2.5-32B | Qwen2.5-32B-Instruct |"
    assert lines[4] == "| 4: 18/30 (7 passes) | 1: 3/10 (3 passes) |"
    assert lines[7] == "| 11: 28/60 (11 passes) | 4: 18/30 (7 passes) |"
    assert lines[13] == "| 23: 30/30 (7 passes) | 13: 60/60 (11 passes) |" and len(lines) == 14
    few = paper_appendix.longest_drafts([run_of(answer("failfast", "failfast", records[1]["question"], rounds[:1]))])
    assert few.splitlines()[5] == "| 5: 20/20 (6 passes) | - |"
    assert "| these records: no answer |" in paper_appendix.longest_drafts([run_of(*records[:1])])
