"""The preset, and `bench paper`, on a stub engine's records."""

import json
import sys
import types

import pytest
import yaml
from stub_engine import StubEngine, StubEnginePool

from failfast_jax import generate
from failfast_jax.bench import comparison, engine_pool
from failfast_jax.bench.__main__ import main
from failfast_jax.bench.run_config import PRESETS
from failfast_jax.checkpoints import hub
from failfast_jax.errors import CheckpointError
from failfast_jax.public_data.question_sets import load_dataset
from failfast_jax.train import __main__ as train

EAGLE = "ruipeterpan/Qwen2.5-32B-Instruct_EAGLE3_UltraChat"
GPQA = {
    "Record ID": "rec1",
    "Question": "Which?",
    "Correct Answer": " this\n",
    **{f"Incorrect Answer {i}": f"that {i}" for i in (1, 2, 3)},
}


@pytest.fixture
def stub(monkeypatch):
    engine = StubEngine()
    names = ("target", "drafter", "ar_drafter")
    pool = lambda *sources, **_: StubEnginePool(engine, **dict(zip(names, sources)))  # noqa: E731
    monkeypatch.setattr(comparison, "EnginePool", pool)
    kinds = {"Qwen/Qwen2.5-1.5B-Instruct": ("autoregressive", "ar"), EAGLE: ("eagle", "eagle3")}
    monkeypatch.setattr(engine_pool, "own_method", lambda source: kinds.get(source, ("block-diffusion", "failfast")))
    monkeypatch.setattr(hub, "resolve_source", lambda source: source)
    return engine


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
    assert preset("--methods", "failfast,ar,fast-dllm+,wide") == 0
    found = {r["setting"]: r for r in records(tmp_path)}
    own = found["failfast"]["options"]
    assert own == {"schedule": "aligned", "spec_len": 10, "max_spec_len": 60, "threshold": 0.05, "tau": 0.45}
    assert {label for label in found if label.startswith("ar:")} == {f"ar:spec_len={n}" for n in range(3, 21)}
    assert sum(label.startswith("fast-dllm+:") for label in found) == 18 and "wide" in found
    asked = {prompt for *_, prompt in stub.given}
    assert asked == {
        f"\n        Solve the following math problem efficiently and clearly. Please reason step by step, \n        "
        "separate logical reasoning steps with two newline characters (\n\n), and put your final answer within "
        f"\\boxed{{}}.\n        Problem: What is {n}?\n        "
        for n in (1, 2)
    }


def test_every_row_runs(preset, tmp_path, capsys):
    assert preset("--limit", "1") == 0
    found = {r["setting"]: r for r in records(tmp_path)}
    others = {"vanilla", "eagle3", "suffix", "failfast", "reuse", "congestion", "ar-dynamic", "wide", "tree"}
    assert {label for label in found if ":" not in label} == others and len(found) == len(others) + 36
    assert found["eagle3"]["options"] == {"tree_depth": 7, "tree_top_k": 10, "tree_budget": 59, "drafter": EAGLE}


def test_options_by_size_and_by_flag(preset, tmp_path, capsys):
    assert preset("--methods", "failfast", "--target", "Qwen/Qwen2.5-7B-Instruct") == 0
    assert {r["options"].get("tau") for r in records(tmp_path)} == {None, 0.5}
    other = ("--methods", "failfast", "--out", str(tmp_path / "other"))
    assert preset(*other, "--set", "failfast:tau=0.3", "failfast:spec_len=8") == 0
    assert "failfast" in capsys.readouterr().out
    assert preset(*other, "--set", "wide:tau=0.3") == 2
    assert "--set wide:tau=0.3: there is no such row; rows: failfast" in capsys.readouterr().err
    assert preset(*other, "--set", "failfast:speed=3") == 2
    assert "--set failfast:speed=3: there is no option 'speed' of failfast" in capsys.readouterr().err
    assert preset("--methods", "eagle3", "--target", "my-70B") == 2
    assert "eagle3: drafter: known for 32B; this target: my-70B (--set ROW:drafter=..." in capsys.readouterr().err


def test_rows_are_changed_and_swept_around(preset, tmp_path, capsys):
    """`ROW:key=value` and `--sweep ROW:key=...` start from the preset's row, not from the method's defaults."""
    released = {"schedule": "aligned", "spec_len": 10, "max_spec_len": 60, "threshold": 0.05, "tau": 0.45}
    chains = "eagle3:tree_depth=none,tree_top_k=none,tree_budget=none,spec_len=3|5"
    methods = ["--methods", "failfast,failfast:tau=0.3,spec-len=8,ar:spec_len=8,fast-dllm+:threshold=0.5"]
    sweeps = ["--sweep", "failfast:max_spec_len=10|20", "--sweep", chains]
    sweeps += ["--sweep", "fast-dllm:spec_len=8,threshold=0.2|0.4"]  # not a row: a method
    assert preset(*methods, *sweeps, "--set", "failfast:threshold=0.1", "fast-dllm+:spec_len=3|4", "--limit", "1") == 0
    found = {r["setting"]: r["options"] for r in records(tmp_path)}
    own = {**released, "threshold": 0.1}
    assert found["failfast"] == own and found["failfast:tau=0.3,spec_len=8"] == {**own, "tau": 0.3, "spec_len": 8}
    assert found["ar:spec_len=8"] == {"spec_len": 8}
    assert {n for n in found if "0.5" in n} == {f"fast-dllm+:threshold=0.5,spec_len={n}" for n in (3, 4)}
    assert [found[f"failfast:max_spec_len={n}"] for n in (10, 20)] == [{**own, "max_spec_len": n} for n in (10, 20)]
    chain = found["eagle3:spec_len=5"]
    assert (chain["spec_len"], chain["tree_budget"], chain["drafter"]) == (5, None, EAGLE)
    assert found["fast-dllm:spec_len=8,threshold=0.2"] == {"spec_len": 8, "threshold": 0.2}
    assert "| **failfast:max_spec_len=" in capsys.readouterr().out
    assert preset("--methods", "failfats") == 2
    assert "--methods failfats: there is no such row; rows: auto" in capsys.readouterr().err
    assert preset("--methods", "reuse:speed=1") == 2
    assert "--methods reuse:speed=1: there is no option 'speed' of failfast" in capsys.readouterr().err
    assert preset("--methods", "failfast", "--sweep", "reuse:speed=1|2") == 2
    assert "--sweep reuse:speed=1|2: there is no option 'speed' of failfast" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "command, flag, name",
    [
        (f"bench run --preset batch-sizes --target {QWEN}", "--target", QWEN),
        (f"bench run --preset specdiff --dataset humaneval --drafter {FAST}", "--drafter", FAST),
        (f"bench run --dataset humaneval --methods ar --ar-drafter {QWEN}", "--ar-drafter", QWEN),
        (
            f"bench run --dataset humaneval --methods eagle3:drafter={EAGLE}",
            f"--methods eagle3:drafter={EAGLE}:",
            EAGLE,
        ),
        (f"generate --prompt x --target {QWEN} --drafter {FAST}", "--target", QWEN),
        (f"generate --prompt x --drafter {FAST} --method failfast", "--drafter", FAST),
        (f"train --data x --target {QWEN}", "--target", QWEN),
        (f"train --data x --preset fast-dllm-v2 --start {FAST}", "--start", FAST),
        (f"train selfgen --target {QWEN}", "--target", QWEN),
    ],
)
def test_each_command_names_what_is_missing(command, flag, name, tmp_path, monkeypatch, capsys):
    def absent(*_, **__):
        raise OSError("not in the cache")

    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    hub.snapshot.cache_clear()
    module, *words = command.split()
    run = {"bench": main, "generate": generate.main, "train": train.main}[module]
    out = ["--out", str(tmp_path / "out")] if module != "generate" else []
    assert run([*words, *out]) == 2
    said = capsys.readouterr().err
    assert f"error: {flag} {name}: no such file or folder here" in said
    assert f"where there is a network: hf download {name}" in said
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_all_that_is_missing_is_named_at_once(tmp_path, monkeypatch, capsys):
    def absent(*_, **__):
        raise OSError("not in the cache")

    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    datasets = types.ModuleType("datasets")
    datasets.load_dataset = absent
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    hub.snapshot.cache_clear()
    base = ["--out", str(tmp_path / "out")]
    assert train.main(["--data", "x", "--preset", "fast-dllm-v2", "--target", QWEN, "--start", FAST, *base]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if f"--target {QWEN}: no such file" in line]
    assert [line for line in said if line.startswith(f"--start {FAST}: no such file")]
    assert main(["run", "--dataset", "math500,gsm8k", "--methods", "failfast", "--no-figures", *base]) == 2
    said = capsys.readouterr().err
    assert "math500: HuggingFaceH4/MATH-500 is neither" in said and "gsm8k: openai/gsm8k is neither" in said


def test_choices(tmp_path):
    file = tmp_path / "gpqa.jsonl"
    file.write_text(json.dumps(GPQA))
    entry = next(e for e in yaml.safe_load(PRESETS["failfast-paper"].read_text())["datasets"] if e["name"] == "gpqa")
    own = {"template": entry["template"], "choices": entry["choices"]}
    (question,) = load_dataset("gpqa", data=file, **own).questions
    assert question.reference == {"answer": "A"} and "(A)  this\n\n        (B) that 1" in question.prompt
    with pytest.raises(ValueError, match="gpqa: choices 'best'"):
        load_dataset("gpqa", data=file, choices="best")
    with pytest.raises(ValueError, match="aime: choices 'shuffled'"):
        load_dataset("aime", data=file, choices="shuffled")


def test_choices_by_flag(preset, stub, tmp_path, capsys):
    """The preset has the correct answer first; the other order is that of every other run."""
    file = tmp_path / "gpqa.jsonl"
    file.write_text(json.dumps({**GPQA, "Question": "Which one?"}))
    gpqa = ["--dataset", "gpqa", "--data", f"gpqa={file}", "--methods", "suffix", "--out", str(tmp_path / "gpqa")]
    args = ["run", "--preset", "failfast-paper", "--no-scores", "--no-figures", *gpqa]
    assert main([*args, "--choices", "shuffled"]) == 0
    (prompt,) = {prompt for *_, prompt in stub.given}
    (shuffled,) = load_dataset("gpqa", data=file, template="{A}|{B}|{C}|{D}").questions
    assert all(f") {text}\n" in prompt for text in shuffled.prompt.split("|")) and shuffled.reference["answer"] != "A"
    assert main([*args, "--choices", "correct-first"]) == 2
    assert "other settings (prompt rec1 of gpqa)" in capsys.readouterr().err
    assert preset("--methods", "suffix", "--choices", "shuffled") == 2
    assert "--choices shuffled: --dataset does not name gpqa" in capsys.readouterr().err


@pytest.mark.parametrize("name, row", [("cnn", {"article": "It rained."}), ("openwebtext", {"text": "word " * 90})])
def test_datasets_of_specdiff(name, row, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (question,) = load_dataset(name, data=file).questions
    assert question.prompt.count("word") in (0, 64) and ("It rained." in question.prompt) is (name == "cnn")


# -- `bench paper` -------------------------------------------------------------------------------------------------


def test_all_rows_of_a_folder_are_shown(preset, stub, tmp_path, capsys):
    """Not those of the last session alone, whose summary lies there."""
    assert preset("--methods", "ar,failfast") == 0 and preset("--methods", "failfast:tau=0.9") == 0
    capsys.readouterr()
    assert main(["paper", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "AR drafter `ar:spec_len=" in said.out and "FailFast `failfast`, failfast:tau=0.9 `" in said.out


def test_a_killed_run_is_said(preset, stub, tmp_path, capsys):
    rows, run = "ar,failfast", str(tmp_path / "out")
    stub.fail_after = 2 * 7 + 8  # the first six lengths are done, and vanilla and seven others of the next ones
    assert preset("--methods", rows) == 130
    capsys.readouterr()
    assert main(["paper", run]) == 0
    said = capsys.readouterr()
    assert "- math500, n = 1: AR drafter" in said.out
    for text in (said.out, said.err):
        assert (
            "math500: unfinished, tables have the 1 answers that every row there has; answers that rows lack: ar:"
            in text
        )
    stub.fail_after = None
    assert preset("--methods", rows) == 0
    capsys.readouterr()
    assert main(["paper", run]) == 0
    said = capsys.readouterr()
    assert "- math500, n = 2: AR drafter" in said.out and "unfinished" not in said.out + said.err


def test_the_command(preset, tmp_path, capsys):
    assert preset("--methods", "failfast,ar,fast-dllm+,suffix") == 0
    out = tmp_path / "paper"
    places = ["--trajectory", "math500/q1"]
    assert main(["paper", str(tmp_path / "out"), "--out", str(out), *places]) == 0
    captured = capsys.readouterr()
    assert "## Numbers of the text" in captured.out and "passes / round, as made here" in captured.out
    drawn = ("latency", "strip", "passes", "easy_regions", "theory")
    assert {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")} <= {f.name for f in out.iterdir()}
    pages = sorted(f.name for f in out.glob("trajectory-*.html"))
    page = (out / "trajectory-math500-q1.html").read_text()
    assert pages == ["trajectory-math500-q1.html"] and 'class="rejected"' in page
    assert "<h2>failfast</h2>" in page and "<h2>vanilla</h2>" in page
    assert main(["paper", str(tmp_path / "out"), "--out", str(tmp_path / "none"), "--trajectory", "math500/q9"]) == 2
    captured = capsys.readouterr()
    assert "no such question in" in captured.err and not captured.out and not (tmp_path / "none").exists()
    assert main(["paper", str(tmp_path / "out"), "--trajectory", "math500/q1"]) == 2
    assert main(["paper", str(tmp_path)]) == 2
    assert "records.jsonl: no such file" in capsys.readouterr().err


def test_old_records_are_refused(preset, tmp_path, capsys):
    assert preset("--methods", "failfast") == 0
    path = tmp_path / "out" / "records.jsonl"
    path.write_text(path.read_text().replace('"drafter": {"kind"', '"old": {"kind"'))
    assert main(["paper", str(tmp_path / "out")]) == 2
    assert "recorded without drafted ids" in capsys.readouterr().err


def test_pages_of_two_runs_of_one_name_would_be_one(tmp_path, capsys):
    runs = [str(tmp_path / place / "32b") for place in ("first", "second")]
    assert main(["paper", *runs, "--trajectory", "math500/q1", "--out", str(tmp_path / "out")]) == 2
    assert "--trajectory: two runs are called 32b" in capsys.readouterr().err
