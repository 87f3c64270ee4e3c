"""The recipe's order of steps, and what ships."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest

from failfast_jax.bench import tune
from failfast_jax.train import __main__ as train
from failfast_jax.train import recipe, run, selfgen


@pytest.fixture
def steps(monkeypatch):
    """The recipe's steps, recorded instead of run; `status` is what they return next."""
    record = SimpleNamespace(calls=[], status={})

    def run_step(command, words, deadline):
        name, flags = command[-1].rpartition(".")[2], dict(itertools.pairwise(words))
        record.calls.append((name, words, deadline))
        out = recipe.Path(flags["--out"])
        out.mkdir(parents=True, exist_ok=True)
        if name == "train":
            (out / "drafter").mkdir(exist_ok=True)
            (out / "log.jsonl").write_text(out.name)
            for file in ("config.json", "model.safetensors"):
                (out / "drafter" / file).write_text(file)
        if name == "tune":
            assert recipe.Path(flags["--drafter"]).is_dir() and words[-1] == "--write"
            (out / "tuned.json").write_text(json.dumps({"report": {"measured_speedup": float(out.name[-1])}}))
        return record.status.pop(name, 0)

    monkeypatch.setattr(recipe, "run_step", run_step)
    return record


def test_the_recipe_runs_its_steps_and_ships_the_fastest(steps, tmp_path, capsys):
    args = ["recipe", "--profile", "dry-run", "--out", str(tmp_path)]
    steps.status["train"] = 3
    now = time.monotonic()
    assert train.main([*args, "--minutes", "5"]) == 3
    assert [name for name, *_ in steps.calls] == ["selfgen", "selfgen", "train"]
    assert all(now < deadline <= time.monotonic() + 300 for *_, deadline in steps.calls)
    assert not (tmp_path / "asset").exists()
    steps.calls.clear()
    assert train.main(args) == 0
    assert [name for name, *_ in steps.calls] == ["selfgen", "selfgen", "train", "train", "tune", "tune"]
    trained = [words for name, words, _ in steps.calls if name == "train"]
    assert [words[words.index("--layers") + 1] for words in trained] == ["29", "28,29"]
    assert {words[words.index("--cache-layers") + 1] for words in trained} == {"27,28"}
    held_out = str(tmp_path / "runs" / "last-1" / "held_out.npz")
    assert all(words[words.index("--prompts") + 1] == held_out for name, words, _ in steps.calls if name == "tune")
    assert sorted(file.name for file in (tmp_path / "asset").iterdir()) == [
        *("choice.json", "config.json", "log.jsonl", "model.safetensors")
    ]
    assert (tmp_path / "asset" / "log.jsonl").read_text() == "last-2"
    choice = json.loads((tmp_path / "asset" / "choice.json").read_text())
    assert choice["chosen"] == "last-2" and choice["tuned"].keys() == {"last-1", "last-2"}
    assert train.main(["recipe", "--profile", "cpu", "--out", str(tmp_path)]) == 2
    assert "begun with other settings (profile: 'dry-run' there, 'cpu' here)" in capsys.readouterr().err


def test_a_step_is_a_command_with_what_is_left_of_the_time(tmp_path, capfd, monkeypatch):
    said = tmp_path / "said.txt"
    told = f"import sys; open({str(said)!r}, 'w').write(' '.join(sys.argv[1:])); sys.exit(3)"
    (tmp_path / "told.py").write_text(told)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert recipe.run_step(("told", "selfgen"), ["--seed", "7"], math.inf) == 3
    assert said.read_text() == "selfgen --seed 7"
    assert "recipe: python -m told selfgen --seed 7" in capfd.readouterr().err
    assert recipe.run_step(("told",), [], time.monotonic() + 600) == 3
    assert 9 < float(said.read_text().removeprefix("--minutes ")) <= 10
    said.unlink()
    assert recipe.run_step(("told",), [], time.monotonic()) == 3 and not said.exists()


@pytest.mark.parametrize("profile", recipe.PROFILES)
def test_the_steps_know_the_recipes_options(profile, tmp_path):
    """Real parsers: a misspelt option would only show after hours."""
    for command, words in recipe.steps(recipe.PROFILES[profile], tmp_path):
        module = {recipe.SELFGEN: selfgen, recipe.TRAIN: run, recipe.TUNE: tune}[command]
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        args = parser.parse_args(words)
        if command == recipe.TRAIN:
            run.check(args)
