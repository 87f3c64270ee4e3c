"""`bench run` with a real engine: records, summary and figures."""

import json

import pytest
from checkpoint_files import GOLDEN
from tiny_models import diffusion_config, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import engine_pool
from failfast_jax.bench.__main__ import main
from failfast_jax.bench.answer_log import AnswerLog
from failfast_jax.bench.summary import nested, totals

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 3]]
SMALL = ["--max-new-tokens", "24", "--set", "spec_len=3", "max_spec_len=3", "ignore_eos=true"]
"""Few widths: they compile in seconds."""


@pytest.fixture(scope="module")
def engine():
    return FailFast(random_model(tiny_config(num_layers=1), 1), random_model(diffusion_config(), 2))


@pytest.fixture
def answers(engine, monkeypatch):
    """The engine in place of those that are loaded; a list of the `(method, prompt, compiled)` of its answers."""
    given, generate = [], engine.generate

    def counted(prompts, config):
        results = generate(prompts, config)
        given.append((config.method, prompts[0], bool(results[0].stats.compiles + results[0].stats.cache_hits)))
        return results

    monkeypatch.setattr(engine_pool.FailFast, "load", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "generate", counted)
    return given


@pytest.mark.long(rare=True)
def test_a_run(answers, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    args = ["--dataset", str(prompts), "--methods", "failfast,lookup", *SMALL, "--repeats", "2", "--out", str(out)]
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert "| failfast |" in printed and printed.strip() == (out / "summary.md").read_text().strip()

    # Warm answers only, in an order that turns round.
    warm = [(method, prompt) for method, prompt, compiled in answers if not compiled]
    there, back = ["vanilla", "failfast", "lookup"], ["lookup", "failfast", "vanilla"]
    assert [method for method, _ in warm] == [*there, *back, *back, *there]
    assert [prompt for _, prompt in warm[::3]] == PROMPTS[::-1] * 2  # short prompts first

    head, *records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert head["kind"] == "run" and head["identity"]["options"]["spec_len"] == 3
    assert len(records) == 12
    for record in records:
        assert record["tokens"] == len(record["output_ids"]) == 24 and record["decode_s"] > 0
        if record["method"] != "vanilla":
            assert len(record["detail"]) == record["rounds"]
            assert sum(entry["accepted"] for entry in record["detail"]) == record["accepted"]
            assert all(len(entry["confidence"]) == entry["drafted"] for entry in record["detail"])
    found = json.loads((out / "summary.json").read_text())["datasets"]["prompts.jsonl"]["settings"]
    assert found == nested(totals(AnswerLog.read(out).frame())) and list(found) == there
    assert all(row["verdicts"]["equal"] == 4 and row["score"] is None for row in found.values())

    # Drawn again from the records alone.
    written = sorted((out / "figures").iterdir())
    assert {file.stem for file in written} == {"speedup", "length_cdf", "calibration"} and len(written) == 6
    (out / "summary.json").unlink()
    for file in written:
        file.unlink()
    assert main(["--redraw", "--out", str(out)]) == 0 and sorted((out / "figures").iterdir()) == written
    assert main(["--redraw", "--out", str(out / "nowhere")]) == 2
    answers.clear()
    assert main([*args, "--no-figures"]) == 0 and not answers


@pytest.mark.parametrize(
    ("prompt", "message"), [([1, 999], "token id 999"), ([3] * 300, "question 0: its 300 tokens leave no room")]
)
def test_what_the_engine_refuses(prompt, message, answers, tmp_path, capsys):
    path, out = tmp_path / "bad.jsonl", tmp_path / "out"
    path.write_text(json.dumps(prompt))
    assert main(["--dataset", str(path), "--methods", "failfast", "--no-figures", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not answers and not out.exists()


@pytest.mark.long(rare=True)
def test_all_drafters_of_one_target(tmp_path, capsys):
    """Each variant with its own drafter, beside those that draft with none; the others are left out by name."""
    field, prompts = GOLDEN / "field", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps([3, 17, 40]) + "\n")
    published = {"dflash": "dflash_qwen3_a", "dspark": "dspark_qwen3_a", "eagle3": "deepspec_eagle3_qwen3_a"}
    methods = ",".join(f"{method}:drafter={field / name}" for method, name in published.items())
    args = ["--dataset", str(prompts), "--target", str(field / "qwen3_a"), "--max-new-tokens", "12", "--no-figures"]
    assert main([*args, "--methods", methods, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["prompts.jsonl"]["settings"]
    for method, name in published.items():
        row = found[f"{method}:drafter={field / name}"]
        assert row["tau"] == pytest.approx(row["accepted_per_round"] + 1) and row["tau"] > 1
        assert row["verdicts"]["equal"] == 1 and row["passes_per_round"] > 0 and row["verified_per_round"] > 1
    capsys.readouterr()
    drafter = ["--drafter", str(field / published["dspark"])]
    assert main([*args, *drafter, "--methods", "all", "--out", str(tmp_path / "all")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for method in ("dspark", "dflash", "failfast"):
        assert f"| {method} |" in text, method
    assert "Left out: `eagle3` (" in text and "needs a drafter of kind eagle" in text
