"""`bench run` with real engines: records, resuming, tables and figures, and its answers to bad input."""

import builtins
import json

import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import engine_pool, figures, harness, report
from failfast_jax.bench.__main__ import main

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 3]]
SMALL = ["--max-new-tokens", "24", "--set", "spec_len=3", "max_spec_len=3"]
"""Few widths: they compile in seconds."""


@pytest.fixture(scope="module")
def engine():
    target = random_model(tiny_config(num_layers=1), 1)
    return FailFast(target, random_model(diffusion_config(), 2))


@pytest.fixture
def answers(engine, monkeypatch):
    """The engine in place of `load_pair`'s; a list of the `(method, prompt, compiled)` of its answers."""
    given = []
    generate = engine.generate

    def counted(prompts, config):
        results = generate(prompts, config)
        given.append((config.method, prompts[0], bool(results[0].stats.compiles + results[0].stats.cache_hits)))
        return results

    monkeypatch.setattr(engine_pool, "load_pair", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "generate", counted)
    return given


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(PROMPTS[0])}\n\n{json.dumps({'prompt': PROMPTS[1]})}\n")
    return path


def test_run_and_resume(answers, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    common = ["--methods", "failfast,lookup", *SMALL, "--repeats", "2", "--set", "ignore_eos=true"]
    args = ["--dataset", str(prompts), *common, "--set", "tau=0.2", "--out", str(out)]
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert "| failfast |" in printed and printed.strip() == (out / "summary.md").read_text().strip()
    assert {p.name for p in out.iterdir()} == {
        "records.jsonl",
        "figures",
        *(f"summary.{k}" for k in ("json", "md", "csv")),
    }

    # Warm answers only, in an order that turns round.
    warm = [(method, prompt) for method, prompt, compiled in answers if not compiled]
    there, back = ["vanilla", "failfast", "lookup"], ["lookup", "failfast", "vanilla"]
    assert [method for method, _ in warm] == [*there, *back, *back, *there]
    assert [prompt for _, prompt in warm[::3]] == PROMPTS[::-1] * 2  # short prompts first

    lines = (out / "records.jsonl").read_text().splitlines()
    head, *records = [json.loads(line) for line in lines]
    assert head["kind"] == "run" and head["identity"]["options"]["tau"] == 0.2
    assert len(records) == 12
    for record in records:
        assert record["tokens"] == len(record["output_ids"]) == 24 and record["decode_s"] > 0
        if record["method"] != "vanilla":
            assert len(record["detail"]) == record["rounds"]
            assert sum(entry["accepted"] for entry in record["detail"]) == record["accepted"]
            assert all(len(entry["confidence"]) == entry["drafted"] for entry in record["detail"])
    check_summary(out, records)
    check_figures(out, monkeypatch)

    # A killed run: the last turn is missing, and of the one before that an answer, which is cut off.
    (out / "records.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:100])
    answers.clear()
    args += ["--no-figures"]
    assert main(args) == 0
    assert "line 10 is cut off" in capsys.readouterr().err
    assert [(m, p) for m, p, _ in answers] == [("vanilla", PROMPTS[1])] + [(m, PROMPTS[0]) for m in there]
    resumed = (out / "records.jsonl").read_text().splitlines()
    assert resumed[:9] == lines[:9] and json.loads(resumed[9])["kind"] == "run"
    again = [json.loads(line) for line in resumed[10:]]
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in records[8:]]

    answers.clear()
    assert main(args) == 0 and not answers
    args[args.index("tau=0.2")] = "tau=0.3"
    assert main(args) == 2
    assert "other settings (options tau: 0.2 there, 0.3 here)" in capsys.readouterr().err
    args[args.index("tau=0.3")] = "tau=0.2"
    prompts.write_text(json.dumps([4, 4]))
    assert main(args) == 2
    assert "other settings (prompt 0 of prompts.jsonl)" in capsys.readouterr().err


def check_summary(out, records):
    summary = json.loads((out / "summary.json").read_text())
    assert 0 < summary["harness_share"] < 10 and summary["machine"]["cores"]
    found = summary["datasets"]["prompts.jsonl"]
    expected = report.totals(records, ["failfast", "lookup"])
    assert set(found["calibration"]) == {"failfast", "lookup"} and found["calibration"]["failfast"]["rounds"]
    for label, row in found["settings"].items():
        assert row.pop("modelled") > 0 and row.pop("score") is None
        assert row == expected[label] and row["decode_s"] > 0
        assert row["tokens"] == 96 and row["verdicts"]["equal"] == 4
    assert found["settings"]["failfast"]["max_drafted"] == 3


def check_figures(out, monkeypatch):
    folder = out / "figures"
    written = {file.name for file in folder.iterdir()}
    names = ("speedup", "length_cdf", "acceptance_compute", "calibration", "easy_regions", "theory")
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "calibration.svg").read_text()
    # Drawn again from the records alone.
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in names[:2]})
    summary = (out / "summary.json").read_text()
    (out / "summary.json").unlink()
    for file in folder.iterdir():
        file.unlink()
    assert main(["--redraw", "--out", str(out)]) == 0
    assert {file.name for file in folder.iterdir()} == {name for name in written if name.startswith(names[:2])}
    assert main(["--redraw", "--out", str(out / "nowhere")]) == 2
    (out / "summary.json").write_text(summary)


def test_a_difference_fails(answers, engine, prompts, monkeypatch, tmp_path, capsys):
    def spoilt(self, variant, dataset, question):
        result = engine.generate([self.encode(dataset, question)], self.configs[variant.label])[0]
        if variant.method == "lookup":
            result.output_ids[4] = (result.output_ids[4] + 1) % VOCAB
        return result

    monkeypatch.setattr(harness.Comparison, "answer", spoilt)
    args = ["--methods", "failfast,lookup", "--dataset", str(prompts), "--limit", "1", *SMALL, "--no-figures", "--out"]
    args += [str(tmp_path / "out")]
    assert main(args) == 1
    captured = capsys.readouterr()
    assert "| 0 / 0 / 1 |" in captured.out and "lookup, prompts.jsonl question 0: different at token 4" in captured.err
    assert main([*args, "--near-tie", "1e9"]) == 0
    assert "| 0 / 1 / 0 |" in capsys.readouterr().out


def test_options_that_contradict_each_other(answers, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    args = ["--dataset", str(prompts), "--methods", "failfast", "--set", "max_spec_len=5", "--out", str(out)]
    assert main(args) == 2
    assert "--max-spec-len 5: must be at least --spec-len 10" in capsys.readouterr().err
    assert not answers and not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "line 2 needs a prompt"),
        ("[]", "line 2 needs a prompt"),
        ("[1, 999]", "token id 999"),
        (json.dumps([3] * 300), "question 1: its 300 tokens leave no room"),
    ],
)
def test_bad_prompts(line, message, answers, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"[1, 2]\n{line}\n")
    assert main(["--dataset", str(path), "--methods", "failfast", "--no-figures", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not answers


def test_missing_matplotlib_is_said_first(answers, prompts, tmp_path, monkeypatch, capsys):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["--dataset", str(prompts), "--out", str(tmp_path / "out")]) == 2
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err
    assert not answers and not (tmp_path / "out").exists()
