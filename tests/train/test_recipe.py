"""The recipe's order of parts, and the choice by wall clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_files import GOLDEN

from failfast_jax import load_model
from failfast_jax.checkpoints.drafter import decoding_defaults
from failfast_jax.models.conditioned import ConditionedConfig
from failfast_jax.train import __main__ as train
from failfast_jax.train import choose, compare, conditioned, recipe, standalone
from failfast_jax.train.block_diffusion import Corruption, Settings

TARGET = GOLDEN / "llama_tied"
ROWS = 4


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Two untrained drafters that bring decoding defaults of their own."""
    folder, target = tmp_path_factory.mktemp("drafters"), load_model(TARGET)
    for seed in (0, 1):
        config = ConditionedConfig(dataclasses.replace(target.config, num_layers=1), (0,), (0, 1), ROWS, 30)
        model = conditioned.initial(target, config, (1,), seed)
        objective = conditioned.ConditionedObjective(model, target, np.arange(2, 32), conditioned.Settings())
        objective.save(objective.trainable, folder / str(seed), decoding={"cpu": {"tau": 0.9, "spec_len": 2}})
    return [folder / "0", folder / "1"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps([5, 6, 7 + index]) + "\n" for index in range(8)))
    return path


def timed(speeds):
    """Stands for the engine's answers: seconds by what decodes, all outputs equal."""

    def answer(engine, prompt, config):
        key = config.method if config.method != "failfast" else (engine.drafter_name[-1], config.spec_len, config.tau)
        timed.calls.append((tuple(prompt), key))
        stats = SimpleNamespace(decode_s=speeds.get(key, 2.0), rounds=4, accepted=2, drafter_passes=3)
        return SimpleNamespace(stats=stats, output_ids=[1, 2])

    timed.calls = []
    return answer


def test_the_choice_is_the_fastest_and_a_killed_one_goes_on(drafters, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(choose, "answer", timed({"vanilla": 1.0, ("1", 2, 0.3): 0.8, "lookup": 0.5}))
    out = tmp_path / "choice"
    args = ["--target", str(TARGET), "--drafter", *map(str, drafters), "--prompts", str(prompts), "--stage", "2"]
    args += ["--out", str(out), "--spec-len", "2,4", "--tau", "0.3,0.6", "--lookup-min", "0", "--write"]
    assert choose.main([*args, "--minutes", "1e-9"]) == 3
    assert decoding_defaults(drafters[1], "cpu") == {"tau": 0.9, "spec_len": 2}
    with (out / "turns.jsonl").open("a") as file:
        file.write('{"prompt": 1, "ans')  # cut off by a kill
    assert choose.main(args) == 0
    said = capsys.readouterr()
    assert "--method lookup was faster: 2.00 against 1.25" in said.err
    choice = json.loads((out / "choice.json").read_text())
    assert choice["drafter"] == str(drafters[1]) and choice["decoding"] == {"spec_len": 2, "tau": 0.3}
    assert decoding_defaults(drafters[1], "cpu") == choice["decoding"]
    assert decoding_defaults(drafters[0], "cpu") == {"tau": 0.9, "spec_len": 2}
    # Two drafters, (2, 0.3), (2, 0.6) and 4 tokens, which leave tau nothing to decide; halved after every two prompts.
    per_prompt = [len([key for ids, key in timed.calls if ids == (5, 6, 7 + index)]) for index in range(8)]
    assert per_prompt == [8, 8, 5, 5, 4, 4, 3, 3]
    first, second = ([key for ids, key in timed.calls if ids == (5, 6, last)] for last in (7, 8))
    assert second == first[::-1]
    assert choice["table"][0]["candidate"] == "lookup" and choice["table"][1]["speedup"] == pytest.approx(1.25)
    calls = len(timed.calls)
    assert choose.main(args) == 0 and len(timed.calls) == calls
    assert choose.main([*args, "--max-new-tokens", "5"]) == 2
    assert "was begun with another max_new_tokens" in capsys.readouterr().err


def test_candidates_answer_with_the_engine(drafters, prompts, tmp_path, capsys):
    args = ["--target", str(TARGET), "--drafter", str(drafters[0]), "--prompts", str(prompts), "--limit", "1"]
    args += ["--out", str(tmp_path / "choice"), "--spec-len", "4", "--lookup-min", "2", "--min-gain", "0"]
    assert choose.main([*args, "--max-new-tokens", "12"]) == 0
    (line,) = (json.loads(line) for line in (tmp_path / "choice" / "turns.jsonl").read_text().splitlines()[1:])
    mine = next(entry for name, entry in line["answers"].items() if "lookup_min=2" in name)
    assert mine["passes"] > 0 and mine["rounds"] + mine["accepted"] >= 12
    assert line["answers"]["vanilla"]["rounds"] == 12
    assert {entry["output"] for entry in line["answers"].values()} == {mine["output"]}
    assert all(entry["seconds"] > 0 for entry in line["answers"].values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spec-len", "9"], "--spec-len 9: this drafter was trained for drafts of up to 4"),
        (["--drafter", str(TARGET)], "not a folder that python -m failfast_jax.train wrote"),
        (["--stage", "0"], "--stage 0: must be at least 1"),
        (["--prompts", "nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_bad_input(drafters, prompts, tmp_path, flags, message, capsys):
    args = ["--target", str(TARGET), "--drafter", str(drafters[0]), "--prompts", str(prompts)]
    assert choose.main([*args, "--out", str(tmp_path / "choice"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "choice").exists()


@pytest.fixture
def parts(monkeypatch, drafters):
    """The recipe's parts, recorded instead of run; `status` is what they return next."""
    record = SimpleNamespace(calls=[], status={})

    def part(name):
        def main(argv):
            flags = dict(itertools.pairwise(argv))
            record.calls.append((name, argv))
            out = recipe.Path(flags["--out"])
            if name == "train":
                (out / "drafter").mkdir(parents=True, exist_ok=True)
                (out / "log.jsonl").write_text(out.name)
                for file in drafters[0].iterdir():
                    (out / "drafter" / file.name).write_bytes(file.read_bytes())
            if name == "choose":
                out.mkdir(exist_ok=True)
                last = out.parent / "runs" / "last-2" / "drafter"
                (out / "choice.json").write_text(json.dumps({"drafter": str(last)}))
            return record.status.pop(name, 0)

        return main

    for name, module in (("selfgen", recipe.selfgen), ("train", recipe.train), ("choose", recipe.choose)):
        monkeypatch.setattr(module, "main", part(name))
    return record


def test_the_recipe_runs_its_parts_and_ships_the_choice(parts, tmp_path, capsys):
    args = ["--profile", "dry-run", "--out", str(tmp_path)]
    parts.status["train"] = 3
    assert recipe.main([*args, "--minutes", "5"]) == 3
    assert [name for name, _ in parts.calls] == ["selfgen", "selfgen", "train"]
    assert all(0 < float(argv[argv.index("--minutes") + 1]) <= 5 for _, argv in parts.calls)
    assert not (tmp_path / "asset").exists()
    parts.calls.clear()
    assert recipe.main(args) == 0
    assert [name for name, _ in parts.calls] == ["selfgen", "selfgen", "train", "train", "choose"]
    trained = [argv for name, argv in parts.calls if name == "train"]
    assert [argv[argv.index("--layers") + 1] for argv in trained] == ["29", "28,29"]
    assert {argv[argv.index("--cache-layers") + 1] for argv in trained} == {"27,28"}
    assert sorted(file.name for file in (tmp_path / "asset").iterdir()) == [
        *("choice.json", "config.json", "drafter.safetensors", "log.jsonl")
    ]
    assert (tmp_path / "asset" / "log.jsonl").read_text() == "last-2"
    with pytest.raises(SystemExit):
        recipe.main(["--profile", "cpu", "--out", str(tmp_path)])
    assert "begun with another --profile" in capsys.readouterr().err


@pytest.mark.parametrize("profile", recipe.PROFILES)
def test_the_parts_know_the_recipes_options(profile):
    """Real parsers: a misspelt option would only show after hours."""
    values = recipe.PROFILES[profile]
    recipe.selfgen.build_parser().parse_args(["--out", "x", *recipe._flags(values.selfgen)])
    recipe.choose.build_parser().parse_args(["--out", "x", *recipe._flags(values.choose)])
    for options in values.candidates.values():
        flags = recipe._flags(recipe.COMMON | values.train | options)
        args = train.build_parser().parse_args(["--out", "x", "--data", "y", *flags])
        train._check(args)


def test_variants_know_their_options():
    for options in compare.VARIANTS.values():
        flags = compare._flags(compare.COMMON | options)
        train._check(train.build_parser().parse_args(["--out", "x", "--data", "y", *flags]))


def test_rows_of_a_step():
    target = load_model(TARGET)
    base = dataclasses.replace(target.config, num_layers=1)
    for options in (compare.COMMON | compare.CONDITIONED, compare.COMMON | compare.STANDALONE):
        if options["family"] == "standalone":
            settings = Settings(corruption=Corruption("mixed", complementary=True))
            objective = standalone.StandaloneObjective(target, (0,), options["block_size"], settings)
        else:
            config = ConditionedConfig(base, (0,), (0, 1), options["rows"], 30)
            model = conditioned.initial(target, config, (1,), 0)
            settings = conditioned.Settings(anchors=options["anchors"])
            objective = conditioned.ConditionedObjective(model, target, np.arange(30), settings)
        batch = {"tokens": np.zeros((options["batch"], options["seq_len"]), np.int32)}
        assert compare.rows_a_step(options) == objective.tokens(batch)
