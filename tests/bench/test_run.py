"""`bench run` with a stub engine: order, resuming, sweeps, scores, summary, and its answers to bad input."""

import argparse
import json
import sys
from unittest.mock import Mock, call

import pytest
from stub_engine import StubEngine, use_stub

from failfast_jax.bench import comparison, plots, run_command
from failfast_jax.bench.__main__ import main
from failfast_jax.bench.answer_log import DIFFERENT, EQUAL, NEAR_TIE, AnswerLog
from failfast_jax.bench.comparison import Comparison, RunPlan
from failfast_jax.bench.rows import BASELINE, Row
from failfast_jax.bench.run_config import PRESETS, RunConfig, add_arguments
from failfast_jax.drafters import METHODS
from failfast_jax.errors import PromptError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset, Question

PROMPTS = ["first prompt", "second", "third prompt, the longest"]


@pytest.fixture
def stub(monkeypatch):
    return use_stub(monkeypatch)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def bench(stub, tmp_path, out):
    """Runs the command with the stub on `PROMPTS`, without figures."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))

    def run(methods, *args, to=out):
        return main(["--dataset", str(path), "--methods", methods, "--no-figures", "--out", str(to), *args])

    return run


def lines_of(out, kind="answer"):
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def summary_of(out, name="prompts.jsonl"):
    return json.loads((out / "summary.json").read_text())["datasets"][name]


def test_a_killed_run_goes_on(stub, bench, out, tmp_path, capsys):
    """Killed after every other number of answers: each is given once, and the summary is the same."""
    args, whole = ("failfast,lookup", "--repeats", "2"), tmp_path / "whole"
    assert bench(*args, to=whole) == 0
    requested = list(stub.given)
    assert len(requested) == 18 and "goes on" not in capsys.readouterr().err
    # Shortest prompt first, and every other turn the other way round.
    assert [prompt for *_, prompt in requested[:9]] == [p for p in sorted(PROMPTS, key=len) for _ in range(3)]
    assert [method for method, *_ in requested[:6]] == [BASELINE, "failfast", "lookup", "lookup", "failfast", BASELINE]
    stub.given.clear()
    for count in range(1, 18, 2):
        stub.fail_after = count
        assert bench(*args) == 130
        assert len(lines_of(out)) == count
        if count % 3 == 1:  # and in the middle of a write
            with (out / "records.jsonl").open("a") as file:
                file.write('{"kind": "answer", "dataset"')
    stub.fail_after = None
    assert bench(*args) == 0
    assert stub.given == requested

    assert summary_of(out) == summary_of(whole)
    assert "is cut off" in capsys.readouterr().err
    # Once more: nothing to do. With more methods: only they, and the vanilla answers beside them.
    stub.given.clear()
    assert bench(*args) == 0 and not stub.given
    assert bench("failfast,lookup,fast-dllm", *args[1:]) == 0
    assert sorted(method for method, *_ in stub.given) == ["fast-dllm"] * 6 + [BASELINE] * 6


def test_many_settings_have_vanilla_beside_them(bench, out):
    assert bench("lookup," + ",".join(f"failfast:tau={i / 10}" for i in range(comparison.BLOCK))) == 0
    records = lines_of(out)
    assert len({record["block"] for record in records}) == 2 and len(records) == 3 * (comparison.BLOCK + 1 + 2)
    assert sum(record["setting"] == BASELINE for record in records) == 6


def test_cold_answers_are_thrown_away(stub, bench, out):
    stub.cold = {("lookup", None), (BASELINE, None)}
    assert bench("lookup", "--limit", "1") == 0
    assert [method for method, *_ in stub.given] == [BASELINE, BASELINE, "lookup", "lookup"]
    assert len(lines_of(out)) == 2


def test_sweeps_report_the_best(bench, out, capsys, monkeypatch):
    monkeypatch.setattr(plots, "FIGURES", {"tau": plots.FIGURES["sensitivity_tau"]})
    sweep = ["--sweep", "failfast:tau=0.3|0.5"]
    assert bench("ar:spec_len=3:8,fast-dllm:spec_len=3:8", "--ar-drafter", "small", *sweep, "--figures") == 0
    text, actual = capsys.readouterr().out, summary_of(out)
    table = actual["settings"]
    for method in ("ar", "fast-dllm"):
        name = f"{method}:spec_len"
        points, best = actual["sweeps"][name]["points"], actual["sweeps"][name]["best"]
        assert points == [f"{method}:spec_len={n}" for n in range(3, 9)]
        assert table[best]["speedup"] == max(table[p]["speedup"] for p in points) > table[points[0]]["speedup"]
        assert actual["rows"][best] == f"{name} (best: {best.rpartition(':')[2]})" and f"**{best}**" in text
        assert sum(label in actual["rows"] for label in points) == 1
    figures = sorted((out / "figures").iterdir())
    assert [file.name for file in figures] == ["tau.png", "tau.svg"]
    # Drawn again from the records alone.
    for file in (*figures, out / "summary.json"):
        file.unlink()
    assert main(["--redraw", "--out", str(out)]) == 0 and sorted((out / "figures").iterdir()) == figures
    assert main(["--redraw", "--out", str(out / "nowhere")]) == 2


def test_batches_have_vanilla_beside_them(stub, bench, out, capsys):
    """Questions of a batch are answered together, by the row and by a `vanilla` of its own, and share the time."""
    path = out.parent / "four.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(4)))
    four = ["--dataset", str(path), "--methods", "lookup", "--sweep", "lookup:batch=2|4", "--no-figures"]
    assert main([*four, "--out", str(out)]) == 0
    records = lines_of(out)
    assert len(records) == 24 and len({record["block"] for record in records}) == 3
    asked = [prompt for method, _, prompt in stub.given if method == "lookup"]
    assert asked == [f"question {n}" for n in range(4)] * 3
    times = {record["setting"]: record["decode_s"] for record in records if record["method"] == "lookup"}
    assert times["lookup"] == 2 * times["lookup:batch=2"] == 4 * times["lookup:batch=4"]
    assert {row["speedup"] for row in summary_of(out, "four.jsonl")["settings"].values()} > {1.0}
    answered = len(stub.given)
    assert main([*four, "--out", str(out)]) == 0 and len(stub.given) == answered
    for value, message in (("3", "four.jsonl has 4 questions, no multiple of batch 3"), ("0", "batch 0: must be")):
        assert main([*four[:2], "--methods", f"lookup:batch={value}", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_rows(name):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    rows = RunConfig.from_flags(parser.parse_args(["--preset", name, "--target", "x-32B"])).chosen_rows()
    assert len(rows) > 5 and all(row.config(GenerationConfig()) for row in rows)


def test_all_leaves_out_what_cannot_run(stub, bench, tmp_path, capsys):
    assert bench("all") == 0
    captured = capsys.readouterr()
    assert "left out: ar: needs --ar-drafter" in captured.err and "`ar` (needs" in captured.out
    methods = {method for method, *_ in stub.given}
    served = {None, "block-diffusion"}
    assert methods == {m for m in METHODS if served & {*(METHODS[m].kinds or (None,))}}
    # Asked for by name, it is an error.
    assert bench("ar,lookup") == 2
    assert "error: ar: needs --ar-drafter" in capsys.readouterr().err
    # Answers of the default pair are not taken for another model's.
    assert bench("lookup", "--target", "t") == 2
    assert "other settings (target name: 'SmolLM2-135M-Instruct.Q4_1.gguf' there, 't' here)" in capsys.readouterr().err


def test_differences(stub, bench, out, tmp_path, capsys):
    stub.wrong = {"lookup"}
    assert bench("failfast,lookup") == 1
    assert "lookup, prompts.jsonl question 1: different at token 2, logit gap 2.00e+00" in capsys.readouterr().err
    rows = summary_of(out)["settings"]
    assert rows["lookup"]["verdicts"] == {EQUAL: 0, NEAR_TIE: 0, DIFFERENT: 3}
    assert rows["failfast"]["verdicts"] == {EQUAL: 3, NEAR_TIE: 0, DIFFERENT: 0}
    # The gap is kept, so that another tolerance needs no other answers.
    assert bench("failfast,lookup", "--near-tie", "2.5") == 0
    assert len(lines_of(out)) == 9
    assert summary_of(out)["settings"]["lookup"]["verdicts"] == {EQUAL: 0, NEAR_TIE: 3, DIFFERENT: 0}
    exact = ("failfast,lookup", "--near-tie", "2.5", "--exact")
    assert bench(*exact) == 2
    assert "other settings (options exact: False there, True here)" in capsys.readouterr().err
    assert bench(*exact, to=tmp_path / "exact") == 1


def test_later_turns_follow_vanilla(stub):
    stub.text = lambda prompt: f"[{len(prompt)}]"
    dataset = Dataset(
        "talk", (Question("a/1", "Hello, you"), Question("a/2", "More", follows="a/1"), Question("b", "x"))
    )
    plan = RunPlan(RunConfig(), GenerationConfig(), [Row("lookup", "lookup")], [dataset])
    Comparison(plan).run(AnswerLog())
    later = "<user>Hello, you<assistant>[10]<user>More"
    assert [prompt for *_, prompt in stub.given] == ["x"] * 2 + ["Hello, you"] * 2 + [later] * 2


def test_scores(stub, out, tmp_path, capsys, monkeypatch):
    file = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in (1, 2, 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stub.text = lambda prompt: "It is \\boxed{4}."
    args = ["--dataset", "gsm8k", "--data", str(file), "--methods", "lookup", "--no-figures", "--out", str(out)]
    assert main(args) == 0
    settings = summary_of(out, "gsm8k")["settings"]
    assert [settings[label]["score"] for label in (BASELINE, "lookup")] == [1 / 3, 1 / 3]
    assert [line["right"] for line in lines_of(out, "score")].count(True) == 1
    monkeypatch.setattr(run_command.scoring, "is_right", None)  # all are scored already
    assert main(args) == 0
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert main(args) == 2 and "--no-scores" in capsys.readouterr().err
    assert main([*args, "--no-scores"]) == 0


CONFIG = """
dataset: {prompts}
methods:
  - lookup
  - method: failfast
    label: slow
    options: {{tau: 0.9, schedule: aligned}}
  - method: fast-dllm
    sweep: {{spec_len: "4:6"}}
options: {{temperature: 0.5, seed: 7}}
repeats: 2
max-new-tokens: 32
figures: false
out: {out}
"""


def test_a_config_file(stub, bench, out, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(prompts=tmp_path / "prompts.jsonl", out=out))
    assert main(["--config", str(file), "--limit", "2", "--repeats", "1"]) == 0
    records = lines_of(out)
    labels = [BASELINE, "lookup", "slow", *(f"fast-dllm:spec_len={n}" for n in (4, 5, 6))]
    assert [r["setting"] for r in records[:6]] == labels and len(records) == 12
    head = lines_of(out, "run")[0]["identity"]["options"]
    assert (head["temperature"], head["seed"], head["max_new_tokens"]) == (0.5, 7, 32)
    rows = (out / "summary.csv").read_text().splitlines()
    assert rows[0].startswith("dataset,setting,row,answers,tokens,") and len(rows) == 1 + len(labels)


ASKED = ["--dataset", "humaneval", "--methods", "failfast"]


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ("speed: 9", [], "unknown key 'speed'"),
        ("- lookup", [], "must be a mapping"),
        ("a: [", [], "not YAML"),
        ("repeats: many", [], "--repeats 'many': must be an integer"),
        ("options: fast", [], "--options 'fast': must be a mapping"),
        ("options: {speed: 9}", [], "options: there is no option 'speed'"),
        ("methods: [{name: ar}]", [], "must be text, or have the keys method, label, options, sweep"),
        ("dataset: [{file: x}]", [], "must be text, or have the keys name, data, limit, template"),
        ("{}", [], "--dataset: name one of math500"),
        ("{}", ["--dataset", "humaneval,humaneval"], "--dataset humaneval: named twice"),
        ("{}", ["--dataset", "aime,gsm8k", "--data", "x"], "Write --data D=x"),
        ("{}", ["--dataset", "humaneval", "--data", "aime=x"], "--data aime=x: --dataset does not name it"),
        ("{}", [*ASKED, "--repeats", "0"], "--repeats 0"),
        ("{}", [*ASKED, "--set", "exact=maybe"], "--exact 'maybe': must be true or false"),
    ],
)
def test_bad_files_and_flags(content, args, message, stub, out, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    assert main(["--config", str(file), *args, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not stub.given and not out.exists()


def test_other_records_are_refused(stub, bench, out, tmp_path, capsys):
    assert bench("failfast,lookup") == 0
    answered = len(stub.given)
    assert bench("lookup,failfast", "--set", "failfast:tau=0.3") == 2
    printed = capsys.readouterr().err
    assert "records.jsonl: failfast was answered with other options (" in printed and "name another --out" in printed
    assert bench("lookup") == 0 and len(stub.given) == answered
    (tmp_path / "prompts.jsonl").write_text(json.dumps("another"))
    assert bench("lookup") == 2
    assert "other settings (prompt 0 of prompts.jsonl)" in capsys.readouterr().err
    (out / "records.jsonl").write_text('{"prompt": 1}\n{"prompt": 2}\n')
    assert bench("lookup") == 2
    assert "line 1 is no record" in capsys.readouterr().err


def test_prompts_that_cannot_be_answered_are_named(stub, bench, out, monkeypatch, capsys):
    stub.max_seq_len = 8
    assert bench("lookup") == 2
    assert "prompts.jsonl, question 0: its 12 tokens leave no room" in capsys.readouterr().err
    monkeypatch.setattr(stub, "encode", Mock(side_effect=PromptError("token id 999")))
    assert bench("lookup") == 2
    assert "prompts.jsonl, question 0: token id 999" in capsys.readouterr().err
    assert not stub.given and not out.exists()


def test_missing_matplotlib_is_said_first(stub, bench, out, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench("lookup", "--figures") == 2
    assert 'pip install "failfast-jax[plot]"' in capsys.readouterr().err
    assert not stub.given and not out.exists()


def test_a_corpus_holds_the_questions_before(stub, bench, monkeypatch):
    """Whatever was killed and begun again: it is filled from the records."""
    seen, generate = [], stub.generate

    def watched(requested, config):
        seen.append((config.method, requested[0], stub.corpus and stub.corpus.tokens[stub.corpus.tokens >= 0].tolist()))
        return generate(requested, config)

    monkeypatch.setattr(stub, "generate", watched)
    stub.fail_after = 5
    assert bench("suffix,suffix:corpus=512") == 130
    seen.pop()
    stub.fail_after = None
    assert bench("suffix,suffix:corpus=512") == 0
    assert [method for method, *_ in seen].count(BASELINE) == len(PROMPTS) and len(seen) == 3 * len(PROMPTS)
    ordered = [stub.encode(prompt) for prompt in sorted(PROMPTS, key=len)]
    answer = stub.encode(stub.text(""))
    for index, prompt in enumerate(ordered):
        earlier = [token for other in ordered[:index] for token in other + answer]
        actual = [corpus for method, requested, corpus in seen if requested == prompt and method == "suffix"]
        assert sorted(actual, key=lambda corpus: corpus is not None) == [None, earlier]
        assert (BASELINE, prompt, None) in seen


# -- engines -------------------------------------------------------------------------------------------------


def test_engines_share_their_target(monkeypatch, tmp_path):
    load = Mock(side_effect=lambda *_, **__: StubEngine(max_seq_len=100 * load.call_count))
    monkeypatch.setattr(comparison.FailFast, "load", load)
    aligned = {"schedule": "aligned"}
    rows = [Row(method, method) for method in ("lookup", "failfast", "fast-dllm")]
    rows += [Row("slow", "failfast", {"tau": 0.9}), Row("aligned", "failfast", aligned), Row("ar", "ar")]

    # The default pair: a drafter for each method and schedule.
    with pytest.raises(ValueError, match="needs --ar-drafter"):
        comparison.EnginePool(RunConfig()).get(rows[-1], GenerationConfig("ar"))
    load.reset_mock()
    default = comparison.EnginePool(RunConfig(ar_drafter="small"))
    options = default.options
    engines = {row.label: default.get(row, row.config(GenerationConfig())) for row in rows}
    pairs = [(None, "failfast", None), (None, "fast-dllm", None), (None, "failfast", "aligned"), ("small", "ar", None)]
    assert load.call_args_list[1:] == [
        call(default.base, drafter, **options, method=method, schedule=schedule) for drafter, method, schedule in pairs
    ]
    default.get(Row("other base", "failfast", {"rope_theta_drafter": 5e5}), GenerationConfig("failfast"))
    assert load.call_args == call(
        default.base, None, **options, method="failfast", schedule=None, rope_theta_drafter=5e5
    )
    assert engines["lookup"] is default.base and engines["failfast"] is engines["slow"]
    assert default.max_seq_len == 100 and set(default.identity()) == {
        "target",
        "ar_drafter",
        "drafter",
        *default.options,
    }

    # Named drafters: one for all methods of its kind.
    load.reset_mock()
    (tmp_path / "weights").write_text("x")
    named = comparison.EnginePool(RunConfig(target="big", drafter=str(tmp_path)))
    for row in rows[:-1]:
        named.get(row, row.config(GenerationConfig()))
    assert load.call_args_list[1:] == [
        call(named.base, str(tmp_path), **named.options, method="failfast", schedule=None)
    ]
    before = named.identity()
    assert before["target"] == {"name": "big", "files": None}
    (tmp_path / "weights").write_text("xy")
    assert named.identity()["drafter"]["files"] != before["drafter"]["files"]
