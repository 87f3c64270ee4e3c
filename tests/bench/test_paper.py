"""The preset, and `bench paper`, on a stub engine's records."""

import json
import sys
import types

import pytest
import yaml
from stub_engine import use_stub

from failfast_jax import generate
from failfast_jax.bench.__main__ import main
from failfast_jax.bench.run_config import PRESETS
from failfast_jax.checkpoints import hub
from failfast_jax.errors import CheckpointError
from failfast_jax.public_data.question_sets import load_dataset
from failfast_jax.train import __main__ as train

EAGLE = "ruipeterpan/Qwen2.5-32B-Instruct_EAGLE3_UltraChat"
GPQA = {
    "Record ID": "rec1",
    "Question": "Which one?",
    "Correct Answer": " this\n",
    **{f"Incorrect Answer {i}": f"that {i}" for i in (1, 2, 3)},
}


@pytest.fixture
def stub(monkeypatch):
    return use_stub(monkeypatch)


@pytest.fixture
def preset(stub, tmp_path):
    """Runs the preset on two questions of MATH, and returns the exit status."""
    rows = [{"problem": f"What is {n}?", "answer": str(n), "unique_id": f"q{n}"} for n in (1, 2)]
    file = tmp_path / "math.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def bench(*args):
        base = ["run", "--preset", "failfast-paper", "--dataset", "math500", "--data", str(file), "--no-scores"]
        return main([*base, "--no-figures", "--out", str(tmp_path / "out"), *args])

    return bench


def records(tmp_path):
    lines = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "answer"]


# -- the preset ----------------------------------------------------------------------------------------------


def test_the_preset_is_the_released_setting(preset, stub, tmp_path):
    assert preset() == 0
    found = {r["setting"]: r["options"] for r in records(tmp_path)}
    others = {"vanilla", "eagle3", "suffix", "failfast", "reuse", "congestion", "ar-dynamic", "wide"}
    swept = {f"{row}:spec_len={n}" for row in ("ar", "fast-dllm+") for n in range(3, 21)}
    assert set(found) == others | swept
    released = {"schedule": "aligned", "spec_len": 10, "max_spec_len": 60, "threshold": 0.05, "tau": 0.45}
    assert found["failfast"] == released
    assert found["eagle3"] == {"tree_depth": 7, "tree_top_k": 10, "tree_budget": 59, "drafter": EAGLE}
    assert {prompt for *_, prompt in stub.given} == {
        f"\n        Solve the following math problem efficiently and clearly. Please reason step by step, \n        "
        "separate logical reasoning steps with two newline characters (\n\n), and put your final answer within "
        f"\\boxed{{}}.\n        Problem: What is {n}?\n        "
        for n in (1, 2)
    }


def test_options_by_size_and_by_flag(preset, tmp_path, capsys):
    assert preset("--methods", "failfast", "--target", "Qwen/Qwen2.5-7B-Instruct") == 0
    assert {r["options"].get("tau") for r in records(tmp_path)} == {None, 0.5}
    other = ("--methods", "failfast", "--out", str(tmp_path / "other"))
    assert preset(*other, "--set", "failfast:tau=0.3", "failfast:spec_len=8") == 0
    assert preset("--methods", "eagle3", "--target", "my-70B") == 2
    assert "eagle3: drafter: known for 32B; this target: my-70B (--set ROW:drafter=..." in capsys.readouterr().err


def test_records_of_other_options_are_refused(preset, stub, tmp_path, capsys):
    assert preset("--methods", "failfast,suffix") == 0
    given = len(stub.given)
    assert preset("--methods", "suffix,failfast", "--set", "failfast:tau=0.3") == 2
    said = capsys.readouterr().err
    assert "records.jsonl: failfast was answered with other options (" in said and "name another --out" in said
    assert preset("--methods", "suffix") == 0 and len(stub.given) == given


def test_missing_weights_are_said_first(preset, stub, tmp_path, monkeypatch, capsys):
    def resolve(source):
        if "Fast_dLLM" in str(source):
            raise CheckpointError(f"{source}: no such file or folder here")

    monkeypatch.setattr(hub, "resolve_source", resolve)
    assert preset("--methods", "ar,failfast") == 2
    said = capsys.readouterr().err
    assert "--drafter Efficient-Large-Model/Fast_dLLM_v2_1.5B: no such file" in said
    assert "the weights: 3 GB, https://huggingface.co/Efficient" in said and not stub.given
    assert preset("--methods", "suffix") == 0  # which needs none


QWEN, FAST = "Qwen/Qwen2.5-7B-Instruct", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"


@pytest.fixture
def absent(monkeypatch):
    """Neither models nor datasets are here or can be fetched."""

    def refuse(*_, **__):
        raise OSError("not in the cache")

    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    datasets = types.ModuleType("datasets")
    datasets.load_dataset = refuse
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    hub.snapshot.cache_clear()


@pytest.mark.parametrize(
    "command, flag, name",
    [
        (f"bench run --preset batch-sizes --target {QWEN}", "--target", QWEN),
        (f"bench run --dataset humaneval --methods ar --ar-drafter {QWEN}", "--ar-drafter", QWEN),
        (f"bench run --dataset humaneval --methods eagle3:drafter={FAST}", f"--methods eagle3:drafter={FAST}:", FAST),
        (f"generate --prompt x --target {QWEN} --drafter {FAST}", "--target", QWEN),
        (f"generate --prompt x --drafter {FAST} --method failfast", "--drafter", FAST),
        (f"train --data x --preset fast-dllm-v2 --start {FAST}", "--start", FAST),
        (f"train selfgen --target {QWEN}", "--target", QWEN),
    ],
)
def test_each_command_names_what_is_missing(command, flag, name, absent, tmp_path, capsys):
    module, *words = command.split()
    run = {"bench": main, "generate": generate.main, "train": train.main}[module]
    out = ["--out", str(tmp_path / "out")] if module != "generate" else []
    assert run([*words, *out]) == 2
    printed = capsys.readouterr().err
    assert f"error: {flag} {name}: no such file or folder here" in printed
    assert f"where there is a network: hf download {name}" in printed
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_all_that_is_missing_is_named_at_once(absent, tmp_path, capsys):
    base = ["--out", str(tmp_path / "out")]
    assert train.main(["--data", "x", "--preset", "fast-dllm-v2", "--target", QWEN, "--start", FAST, *base]) == 2
    printed = capsys.readouterr().err
    assert f"--target {QWEN}: no such file" in printed and f"\n--start {FAST}: no such file" in printed
    assert main(["run", "--dataset", "math500,gsm8k", "--methods", "failfast", "--no-figures", *base]) == 2
    printed = capsys.readouterr().err
    assert "math500: HuggingFaceH4/MATH-500 is neither" in printed and "gsm8k: openai/gsm8k is neither" in printed


def test_choices(preset, stub, tmp_path, capsys):
    """The preset has the correct answer first; the other order is that of every other run."""
    file = tmp_path / "gpqa.jsonl"
    file.write_text(json.dumps(GPQA))
    entry = next(e for e in yaml.safe_load(PRESETS["failfast-paper"].read_text())["datasets"] if e["name"] == "gpqa")
    (question,) = load_dataset("gpqa", data=file, template=entry["template"], choices=entry["choices"]).questions
    assert question.reference == {"answer": "A"} and "(A)  this\n\n        (B) that 1" in question.prompt
    args = ["--dataset", "gpqa", "--data", f"gpqa={file}", "--methods", "suffix", "--out", str(tmp_path / "gpqa")]
    args = ["run", "--preset", "failfast-paper", "--no-scores", "--no-figures", *args]
    assert main([*args, "--choices", "shuffled"]) == 0
    (prompt,) = {prompt for *_, prompt in stub.given}
    (shuffled,) = load_dataset("gpqa", data=file, template="{A}|{B}|{C}|{D}").questions
    assert all(f") {text}\n" in prompt for text in shuffled.prompt.split("|")) and shuffled.reference["answer"] != "A"
    assert main([*args, "--choices", "correct-first"]) == 2
    assert "other settings (prompt rec1 of gpqa)" in capsys.readouterr().err
    assert preset("--methods", "suffix", "--choices", "shuffled") == 2
    assert "--choices shuffled: --dataset does not name gpqa" in capsys.readouterr().err
    with pytest.raises(ValueError, match="aime: choices 'shuffled'"):
        load_dataset("aime", data=file, choices="shuffled")


# -- `bench paper` -------------------------------------------------------------------------------------------------


def test_all_rows_of_a_folder_are_shown(preset, stub, tmp_path, capsys):
    """Not those of the last session alone, whose summary lies there."""
    assert preset("--methods", "ar,failfast") == 0 and preset("--methods", "failfast:tau=0.9") == 0
    capsys.readouterr()
    assert main(["paper", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "AR drafter `ar:spec_len=" in said.out and "FailFast `failfast`, failfast:tau=0.9 `" in said.out


def test_a_killed_run_is_noted(preset, stub, tmp_path, capsys):
    rows, run = "ar,failfast", str(tmp_path / "out")
    stub.fail_after = 2 * 7 + 8  # the first six lengths are done, and vanilla and seven others of the next ones
    assert preset("--methods", rows) == 130
    capsys.readouterr()
    assert main(["paper", run]) == 0
    assert "- math500, n = 1 of 2: unfinished: AR drafter" in capsys.readouterr().out
    stub.fail_after = None
    assert preset("--methods", rows) == 0
    capsys.readouterr()
    assert main(["paper", run]) == 0
    assert "- math500, n = 2: AR drafter" in capsys.readouterr().out


def test_the_command(preset, tmp_path, capsys):
    assert preset("--methods", "failfast,ar,fast-dllm+,suffix") == 0
    out = tmp_path / "paper"
    assert main(["paper", str(tmp_path / "out"), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "## Numbers of the text" in captured.out and "passes / round, as made here" in captured.out
    drawn = ("latency", "strip", "passes", "easy_regions")
    assert {f.name for f in out.iterdir()} == {"paper.md", *(f"{n}.{kind}" for n in drawn for kind in ("png", "svg"))}
    assert main(["paper", str(tmp_path)]) == 2
    assert "records.jsonl: no such file" in capsys.readouterr().err


def test_old_records_are_refused(preset, tmp_path, capsys):
    assert preset("--methods", "failfast") == 0
    path = tmp_path / "out" / "records.jsonl"
    path.write_text(path.read_text().replace('"drafter": {"kind"', '"old": {"kind"'))
    assert main(["paper", str(tmp_path / "out")]) == 2
    assert "recorded without drafted ids" in capsys.readouterr().err
