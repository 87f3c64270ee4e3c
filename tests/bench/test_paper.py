"""The preset, and `bench paper`, on a stub engine's records."""

import json

import pytest
from stub_engine import use_stub

from failfast_jax import generate
from failfast_jax.bench.__main__ import main
from failfast_jax.checkpoints import hub
from failfast_jax.train import __main__ as train

EAGLE = "ruipeterpan/Qwen2.5-32B-Instruct_EAGLE3_UltraChat"
QWEN, FAST = "Qwen/Qwen2.5-7B-Instruct", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"


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


def options_of(out):
    """Options by row."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return {line["setting"]: line["options"] for line in lines if line["kind"] == "answer"}


# -- the preset ----------------------------------------------------------------------------------------------


def test_the_preset_is_the_released_setting(preset, stub, tmp_path):
    assert preset() == 0
    options = options_of(tmp_path / "out")
    others = {"vanilla", "eagle3", "suffix", "failfast", "reuse", "congestion", "ar-dynamic", "wide"}
    swept = {f"{row}:spec_len={n}" for row in ("ar", "fast-dllm+") for n in range(3, 21)}
    assert set(options) == others | swept
    released = {"schedule": "aligned", "spec_len": 10, "max_spec_len": 60, "threshold": 0.05, "tau": 0.45}
    assert options["failfast"] == released
    assert options["eagle3"] == {"tree_depth": 7, "tree_top_k": 10, "tree_budget": 59, "drafter": EAGLE}
    assert {prompt for *_, prompt in stub.given} == {
        f"\n        Solve the following math problem efficiently and clearly. Please reason step by step, \n        "
        "separate logical reasoning steps with two newline characters (\n\n), and put your final answer within "
        f"\\boxed{{}}.\n        Problem: What is {n}?\n        "
        for n in (1, 2)
    }
    assert preset("--methods", "failfast", "--target", QWEN, "--out", str(tmp_path / "other")) == 0
    assert options_of(tmp_path / "other")["failfast"] == released | {"tau": 0.5}


@pytest.fixture
def absent(monkeypatch):
    """No model is here or can be fetched."""

    def refuse(*_, **__):
        raise OSError("not in the cache")

    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    hub.snapshot.cache_clear()


@pytest.mark.parametrize(
    "command, missing",
    [
        (f"bench run --preset batch-sizes --target {QWEN}", {"--target": QWEN}),
        (f"bench run --dataset humaneval --methods ar --ar-drafter {QWEN}", {"--ar-drafter": QWEN}),
        (f"bench run --dataset humaneval --methods eagle3:drafter={FAST}", {f"--methods eagle3:drafter={FAST}:": FAST}),
        (
            "bench run --preset failfast-paper --dataset humaneval --methods failfast",
            {"--target": "Qwen/Qwen2.5-32B-Instruct", "--drafter": FAST},
        ),
        (f"generate --prompt x --target {QWEN} --drafter {FAST}", {"--target": QWEN}),
        (f"generate --prompt x --drafter {FAST} --method failfast", {"--drafter": FAST}),
        (f"train --data x --preset fast-dllm-v2 --target {QWEN} --start {FAST}", {"--target": QWEN, "--start": FAST}),
        (f"train selfgen --target {QWEN}", {"--target": QWEN}),
    ],
)
def test_each_command_names_all_that_is_missing(command, missing, absent, tmp_path, capsys):
    module, *words = command.split()
    run = {"bench": main, "generate": generate.main, "train": train.main}[module]
    out = ["--out", str(tmp_path / "out")] if module != "generate" else []
    assert run([*words, *out]) == 2
    printed = capsys.readouterr().err
    for flag, name in missing.items():
        assert f"{flag} {name}: no such file or folder here" in printed
        assert f"where there is a network: hf download {name}" in printed
    assert ("the weights: 3 GB, https://huggingface.co/Efficient" in printed) == ("failfast-paper" in command)
    assert ("--ar-drafter" in printed) == ("--ar-drafter" in missing)
    assert not (tmp_path / "out" / "records.jsonl").exists()


# -- `bench paper` -------------------------------------------------------------------------------------------------


def test_a_killed_run_is_noted(preset, stub, tmp_path, capsys):
    """All rows of its records are shown, not those of the last command alone."""
    run = str(tmp_path / "out")
    stub.fail_after = 2 * 7 + 8  # the first six lengths are done, and vanilla and seven others of the next ones
    assert preset("--methods", "ar,failfast") == 130
    capsys.readouterr()
    assert main(["paper", run]) == 0
    assert "- math500, n = 1 of 2: unfinished: AR drafter" in capsys.readouterr().out
    stub.fail_after = None
    assert preset("--methods", "ar,failfast") == 0 and preset("--methods", "failfast:tau=0.9") == 0
    capsys.readouterr()
    assert main(["paper", run]) == 0
    page = capsys.readouterr().out
    assert "- math500, n = 2: AR drafter `ar:spec_len=" in page and "FailFast `failfast`, failfast:tau=0.9 `" in page


def test_the_command(preset, tmp_path, capsys):
    assert (
        preset("--methods", "failfast,ar,fast-dllm+,suffix", "--set", "ar:spec_len=3|4", "fast-dllm+:spec_len=4") == 0
    )
    run, out = tmp_path / "out", tmp_path / "paper"
    assert main(["paper", str(run), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "## Numbers of the text" in captured.out and "passes / round, as made here" in captured.out
    drawn = ("latency", "strip", "passes", "easy_regions")
    assert {f.name for f in out.iterdir()} == {"paper.md", *(f"{n}.{kind}" for n in drawn for kind in ("png", "svg"))}
    assert main(["paper", str(tmp_path)]) == 2
    assert "records.jsonl: No such file" in capsys.readouterr().err
    records = run / "records.jsonl"
    records.write_text(records.read_text().replace('"drafter": {"kind"', '"old": {"kind"'))
    assert main(["paper", str(run)]) == 2
    assert "recorded without drafted or prompt ids" in capsys.readouterr().err
