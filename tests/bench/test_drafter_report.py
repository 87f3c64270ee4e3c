"""The drafter benchmark: its arithmetic, its records and files, and its answers to bad input."""

import builtins
import json

import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import drafter as bench
from failfast_jax.bench import engine_pool, harness, report
from failfast_jax.bench.variants import parse_option
from failfast_jax.config import GenerationConfig

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 3]]
SMALL = ["--max-new-tokens", "24", "--spec-len", "3", "--max-spec-len", "3"]
"""Few widths: they compile in seconds."""


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
    table = bench.totals(RECORDS, ["failfast"])
    assert table["vanilla"]["tokens_per_s"] == 2.0 and table["vanilla"]["speedup"] == 1.0
    row = table["failfast"]
    assert row["tokens_per_s"] == 5.0 and row["speedup"] == 2.5
    assert row["prompt_speedup"] == {"median": 3.0, "low": 2.5, "high": 3.5, "min": 2.0, "max": 4.0}
    assert (row["max_accepted"], row["max_drafted"]) == (2, 3) and row["acceptance_rate"] == 6 / 14
    assert (row["rounds"], row["drafting_rounds"], row["drafting_share"]) == (8, 6, 0.75)
    assert row["accepted_per_round"] == 6 / 8 and row["accepted_per_drafting_round"] == 1.0
    assert row["draft_length"] == 14 / 6 and row["passes_per_round"] == 2.0 and row["tokens_per_round"] == 2.5
    assert row["verdicts"] == {"equal": 1, "near-tie": 1, "different": 0}
    vanilla, failfast = bench.totals_table(table).splitlines()[2:]
    assert vanilla.startswith("| vanilla | 2.0 | 1.00 | - |")
    assert failfast == (
        "| failfast | 5.0 | 2.50 | 3.00 (2.00 to 4.00) | 2.50 | 0.75 | 1.00 | 2.3 | 2.00 | 75 % | 1 / 1 / 0 |"
    )


def test_what_was_accepted_beyond_the_end_is_not_counted():
    cut = made_up("lookup", 0, 1.0, 6, [([0.8] * 7, 7), ([0.8] * 7, 7)])
    cut["detail"][-1]["emitted"] = 2
    row = bench.totals([made_up("vanilla", 0, 1.0, 6), cut], ["lookup"])["lookup"]
    assert row["accepted_per_round"] == (7 + 2) / 2
    assert bench.calibration([cut], "lookup")["rounds"][8]["accepted"] == 7.0


def test_repeats_of_a_prompt_are_added():
    again = [record | {"repeat": 1, "decode_s": 2.0} for record in RECORDS]
    row = bench.totals(RECORDS + again, ["failfast"])["failfast"]
    assert row["speedup"] == 14 / 8
    spread = row["prompt_speedup"]
    assert (spread["median"], spread["min"], spread["max"]) == ((6 / 3 + 8 / 5) / 2, 8 / 5, 6 / 3)


def test_calibration():
    found = bench.calibration(RECORDS[:3], "failfast")
    assert [b["count"] for b in found["rounds"]] == [0, 0, 0, 0, 0, 0, 0, 2, 0, 1]
    bin7, bin9 = found["rounds"][7], found["rounds"][9]
    assert bin7["confidence"] == pytest.approx(0.725) and bin7["first_accepted"] == 0.5 and bin7["accepted"] == 1.0
    assert (bin9["confidence"], bin9["first_accepted"], bin9["accepted"]) == (1.0, 1.0, 1.0)
    assert found["rounds"][0]["accepted"] is None
    # Judged: 0.7 and 0.9 accepted, 0.75 rejected (what follows it is not judged), 1.0 accepted, 0.2 rejected.
    assert [b["count"] for b in found["tokens"]] == [0, 0, 1, 0, 0, 0, 0, 2, 0, 2]
    assert found["ece"] == pytest.approx((1 * 0.2 + 2 * abs(0.5 - 0.725) + 2 * abs(1.0 - 0.95)) / 5)
    text = bench.calibration_table(found)
    assert "| 0.7-0.8 | 2 | 0.72 | 50 % | 1.00 |" in text and "over 5 drafted tokens" in text
    assert "| 0.0-0.1 | 0 | - | - | - |" in text


def test_without_drafts():
    records = [made_up("vanilla", 0, 4.0, 2), made_up("lookup", 0, 4.0, 2, [([], 0), ([], 0)])]
    table, found = bench.totals(records, ["lookup"]), bench.calibration(records, "lookup")
    assert found["ece"] is None and table["lookup"]["draft_length"] is None
    assert "| - |" in bench.report(table, {"lookup": found})


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
    args = ["--prompts", str(prompts), *SMALL, "--repeats", "2", "--set", "tau=0.2", "--out", str(out)]
    assert bench.main(args) == 0
    printed = capsys.readouterr().out
    assert "| failfast |" in printed and "Confidence of `lookup`" in printed
    assert {p.name for p in out.iterdir()} == {
        *("records.jsonl", "summary.json", "summary.md"),
        *("accepted_over_confidence.png", "accepted_over_confidence.svg"),
    }
    assert (out / "accepted_over_confidence.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (out / "accepted_over_confidence.svg").read_text()
    assert printed.strip() in (out / "summary.md").read_text()

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
        assert record["tokens"] == len(record["output_ids"]) and record["decode_s"] > 0
        if record["method"] != "vanilla":
            assert len(record["detail"]) == record["rounds"]
            assert sum(entry["accepted"] for entry in record["detail"]) == record["accepted"]
            assert all(len(entry["confidence"]) == entry["drafted"] for entry in record["detail"])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"] == report.totals(records, ["failfast", "lookup"])
    assert all(row["verdicts"]["equal"] == 4 for row in summary["methods"].values())
    assert summary["machine"]["cores"] and summary["calibration"]["failfast"]["rounds"]

    # A killed run: the last turn is missing, and of the one before that an answer, which is cut off.
    (out / "records.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:100])
    answers.clear()
    assert bench.main(args) == 0
    assert "line 10 is cut off" in capsys.readouterr().err
    assert [(m, p) for m, p, _ in answers] == [("vanilla", PROMPTS[1])] + [(m, PROMPTS[0]) for m in there]
    again = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert again[:9] == [head, *records[:8]] and again[9]["kind"] == "run"
    assert [r["output_ids"] for r in again[10:]] == [r["output_ids"] for r in records[8:]]

    answers.clear()
    assert bench.main(args) == 0 and not answers
    assert bench.main([*args, "--tau", "0.3"]) == 2
    assert "tau was given before" in capsys.readouterr().err
    assert bench.main([*args[:-4], "--set", "tau=0.3", *args[-2:]]) == 2
    assert "other settings (options tau: 0.2 there, 0.3 here)" in capsys.readouterr().err
    prompts.write_text(json.dumps([4, 4]))
    assert bench.main(args) == 2
    assert "other settings (prompt 0 of prompts)" in capsys.readouterr().err


def test_a_difference_fails(answers, engine, prompts, monkeypatch, capsys):
    def spoilt(self, setting, dataset, question):
        result = engine.generate([self.encode(dataset, question)], self.configs[setting.label])[0]
        if setting.method == "lookup":
            result.output_ids[4] = (result.output_ids[4] + 1) % VOCAB
        return result

    monkeypatch.setattr(harness.Comparison, "answer", spoilt)
    args = ["--methods", "lookup", "--prompts", str(prompts), "--limit", "1", *SMALL]
    assert bench.main(args) == 1
    captured = capsys.readouterr()
    assert "| 0 / 0 / 1 |" in captured.out and "lookup, prompts question 0: different at token 4" in captured.err
    assert bench.main([*args, "--near-tie", "1e9"]) == 0
    assert "| 0 / 1 / 0 |" in capsys.readouterr().out


def test_selfgen_prompts(tmp_path):
    path = tmp_path / "data.npz"
    flat = np.asarray([*PROMPTS[0], *PROMPTS[1]], np.uint16)
    np.savez(path, prompt=flat, prompt_len=np.asarray([len(p) for p in PROMPTS], np.int32))
    assert bench.read_prompts(["selfgen", str(path)]) == PROMPTS
    assert bench.read_prompts([str(path)], 1) == PROMPTS[:1]
    np.savez(path, prompt=flat, prompt_len=np.asarray([3], np.int32))
    with pytest.raises(ValueError, match="sums to 3"):
        bench.read_prompts([str(path)])
    np.savez(path, answer=flat)
    with pytest.raises(ValueError, match="prompt_len"):
        bench.read_prompts([str(path)])


def test_humaneval_prompts():
    assert [type(p) for p in bench.read_prompts(["humaneval"], 2)] == [str, str]


FIELDS = ", ".join(bench.option_fields())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods", "quick"], "--methods quick: must be among failfast"),
        (["--methods", "vanilla"], "--methods vanilla: must be among failfast"),
        (["--methods", ""], "must be among failfast"),
        (["--methods", "ar"], "ar: needs --drafter, an autoregressive model"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--tau", "2"], "--tau 2.0: must be in [0, 1]"),
        (["--tau", "high"], "--tau high: must be a number"),
        (["--spec-len", "1.5"], "--spec-len 1.5: must be an integer"),
        (["--max-spec-len", "5"], "--max-spec-len 5: must be at least --spec-len 10"),
        (["--set", "speed=9"], f"GenerationConfig has no option 'speed' (options: {FIELDS})"),
        (["--set", "method=ar"], "GenerationConfig has no option 'method'"),
        (["--set", "tau"], f"--set tau: must be key=value, with a key among {FIELDS}"),
        (["--set", "exact=maybe"], "--set exact=maybe: must be true or false"),
        (["--tau", "0.3", "--set", "tau=0.4"], "--set tau=0.4: tau was given before"),
        (["--prompts", "mbpp"], "--prompts mbpp: must be humaneval, FILE.jsonl or selfgen FILE.npz"),
        (["--prompts", "selfgen"], "must be humaneval, FILE.jsonl or selfgen FILE.npz"),
        (["--prompts", "selfgen", "no.npz"], "--prompts selfgen no.npz: no such file"),
    ],
)
def test_bad_flags(args, message, answers, prompts, capsys):
    assert bench.main(["--prompts", str(prompts), *args]) == 2
    assert message in capsys.readouterr().err
    assert not answers


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "x"}', "line 2 needs a prompt"),
        ("[]", "line 2 needs a prompt"),
        ("[1, 999]", "token id 999"),
        (json.dumps([3] * 300), "prompt 1 has 300 tokens"),
    ],
)
def test_bad_prompts(line, message, answers, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"[1, 2]\n{line}\n")
    assert bench.main(["--prompts", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not answers


def test_options_of_every_type():
    texts = {"spec_len": "4", "threshold": "0.5", "block_size": "none", "exact": "true", "schedule": "aligned"}
    options = {name: parse_option("--set", name, text) for name, text in texts.items()}
    assert options == {"spec_len": 4, "threshold": 0.5, "block_size": None, "exact": True, "schedule": "aligned"}
    GenerationConfig(**options).validate()


def test_missing_matplotlib_is_said_first(answers, prompts, tmp_path, monkeypatch, capsys):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert bench.main(["--prompts", str(prompts), "--out", str(tmp_path / "out")]) == 2
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err
    assert not answers and not (tmp_path / "out").exists()
