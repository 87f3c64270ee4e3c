"""The tuner: that the search finds what is fastest, its files, and its answers to bad input."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types

import pytest
from checkpoint_files import GOLDEN
from stub_engine import StubEngine
from tiny_models import diffusion_config, random_extended, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import grid, tune
from failfast_jax.bench.tuner import RECORDS
from failfast_jax.checkpoints.tuned import TunedOptions, model_key, read_settings, write_settings
from failfast_jax.command import UNFINISHED
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import ConfigError
from failfast_jax.generate import main

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9], list(range(2, 23)), [4, 4, 8], [3, 2, 1]]
ROWS = 5


@pytest.fixture(scope="module")
def target():
    return random_model(tiny_config())


@pytest.fixture(scope="module")
def extended(target):
    return FailFast(target, random_extended(target, rows=ROWS))


@pytest.fixture(scope="module")
def standalone(target):
    return FailFast(target, random_model(diffusion_config(), seed=2))


# -- settings files ------------------------------------------------------------------------------------------


def settings_file(engine, path, **decoding):
    settings = TunedOptions(
        path=path,
        target={"name": "T", **model_key(engine.target)},
        drafter={"name": "D", **model_key(engine.drafter)},
        machine={"platform": "cpu"},
        decoding={"schedule": "wide", "spec_len": 2, "tau": 1.0, "max_spec_len": 2, **decoding},
    )
    write_settings(settings)
    return path


def test_the_engine_takes_the_file(target, extended, tmp_path, caplog):
    path = settings_file(extended, tmp_path / "tuned.json", lookup_min=0)
    engine = FailFast(target, extended.drafter, settings=path)
    drafter = engine.build_drafter(GenerationConfig(spec_len=1))
    assert (drafter.spec_len, drafter.max_spec_len, float(drafter.rule.tau)) == (1, 2, 1.0)
    assert not caplog.records
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "machine": {"platform": "tpu", "device": "TPU v5e"}}))
    FailFast(target, extended.drafter, settings=path)
    assert "tuned on another machine, platform 'tpu' (here 'cpu')" in caplog.text


def test_a_schedule_in_the_file(target, standalone, tmp_path):
    path = settings_file(standalone, tmp_path / "tuned.json", schedule="aligned", spec_len=3, max_spec_len=9)
    engine = FailFast(target, standalone.drafter, settings=path)
    assert isinstance(engine.build_drafter(GenerationConfig()), Aligned)
    wide = engine.build_drafter(GenerationConfig(schedule="wide"))
    assert isinstance(wide, Wide) and wide.spec_len == 10  # the file is not for that schedule


def test_files_of_other_pairs_are_refused(target, extended, standalone, tmp_path):
    path = settings_file(extended, tmp_path / "tuned.json")
    deeper, other = random_model(tiny_config(num_layers=3)), random_model(tiny_config(), seed=5)
    for model, drafter, message in (
        (deeper, random_extended(deeper, rows=ROWS), "the target T; the target model has num_layers 3, not 2"),
        (other, random_extended(other, rows=ROWS), "the target T; the target model has other weights"),
        (target, random_extended(target, rows=ROWS, seed=7), "the drafter D; the drafter model has other weights"),
        (target, standalone.drafter, "the drafter D; the drafter model has block_size None"),
        (target, None, "no drafter is loaded"),
    ):
        with pytest.raises(ConfigError, match=rf"tuned.json.*{message}"):
            FailFast(model, drafter, settings=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failfast_settings": 7}, "format 7"),
        ({"drafter": None}, "key 'drafter' must be an object"),
        ({"decoding": {"speclen": 3}}, "decoding option 'speclen' is not one of"),
        ({"decoding": {"tau": 3}}, "--tau 3: must be in"),
        ({"decoding": {"min_gain": 1.0}}, "'min_gain' needs 'lookup_min'"),
    ],
)
def test_damaged_files_are_named(extended, tmp_path, change, message):
    path = settings_file(extended, tmp_path / "tuned.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"tuned.json: .*{message}"):
        FailFast("before any model is read", settings=path)


def test_the_command_line_takes_the_file(capsys, tmp_path, golden_model, monkeypatch):
    folders = GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied"
    pair = types.SimpleNamespace(target=golden_model(folders[0].name), drafter=golden_model(folders[1].name))
    path = str(settings_file(pair, tmp_path / "tuned.json", schedule="aligned"))
    request = ["--target", str(folders[0]), "--drafter", str(folders[1]), "--settings", path, "--token-ids", "7,12"]

    def said(engine, prompts, config):
        drafter = engine.build_drafter(config)
        raise ValueError(f"{type(drafter).__name__} {drafter.spec_len} {drafter.max_spec_len}")

    monkeypatch.setattr(FailFast, "generate", said)
    assert main([*request, "--json"]) == 2
    assert capsys.readouterr().err == "error: Aligned 2 2\n"
    assert main([*request, "--json", "--schedule", "wide", "--spec-len", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: Wide 3 60")
    assert main(["--prompt", "x", "--method", "vanilla", "--settings", "t.json"]) == 2
    assert "--settings t.json: only --method failfast takes tuned settings" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="t.json: no such file"):
        read_settings(tmp_path / "t.json")


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def command(extended, tmp_path, monkeypatch):
    """Runs the command with a tiny pair; returns its status and the summary."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    monkeypatch.setattr(tune, "load_pair", lambda *_, **__: extended)
    monkeypatch.setattr(extended, "decoding", {})

    def run(*args, out="out"):
        fixed = ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "20", "--out", str(tmp_path / out)]
        status = bench.main(["tune", *fixed, *args])
        path = tmp_path / out / tune.SUMMARY
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


BEST = {"spec_len": 4, "tau": 0.75, "lookup_min": 3, "min_gain": 0.5}


class ScriptedEngine(StubEngine):
    """Answers at a speed that falls with each step away from `BEST`.

    Attributes:
      top: speed of `BEST`, over plain decoding's.
    """

    top = 2.0

    def generate(self, prompts, config):
        (result,) = super().generate(prompts, config)
        speed = {"vanilla": 1.0, "lookup": 1.2}.get(config.method)
        if speed is None:
            options = {"min_gain": 0.0, "tau": 0.45, **config.options}
            steps = sum(
                abs(options[name] - value) / {"tau": 0.15, "min_gain": 0.5}.get(name, 1) for name, value in BEST.items()
            )
            speed = self.top / (1 + 0.05 * steps)
        # Prompts differ, and the machine becomes slower and slower.
        seconds = len(prompts[0]) * (1 + 0.001 * len(self.given)) / speed
        return [dataclasses.replace(result, stats=dataclasses.replace(result.stats, decode_s=seconds))]


@pytest.fixture
def scripted(extended, monkeypatch):
    """An engine in the place of the tiny pair's, which only says what settings there are."""
    engine = ScriptedEngine()
    monkeypatch.setattr(extended, "generate", engine.generate)
    return engine


def test_the_fastest_setting_wins(command, scripted, tmp_path, capsys):
    status, summary = command()
    assert status == 0
    assert {name: summary["chosen"][name] for name in BEST} == BEST
    assert summary["chosen"]["measured_speedup"] == pytest.approx(2, rel=0.02)
    assert summary["chosen"]["lookup_speedup"] == pytest.approx(1.2, rel=0.02)
    assert summary["settings"][0]["label"] == summary["chosen"]["label"]
    timed = [row["measured_prompts"] for row in summary["settings"]]
    assert timed[0] == len(PROMPTS) and timed[-1] == 2 and timed == sorted(timed, reverse=True)
    assert "faster" not in capsys.readouterr().err.replace("fastest", "")
    raw = json.loads((tmp_path / "out" / tune.TUNED).read_text())
    assert raw["failfast_settings"] == 1 and raw["decoding"] == {"schedule": "wide", **BEST}
    assert raw["report"]["prompts"] == len(PROMPTS)
    methods = [method for method, *_ in scripted.given]
    assert methods.count("failfast") < 200  # of settings and prompts there are 5 times as many
    everything = command("--full-sweep")[1]
    assert everything["chosen"]["label"] == summary["chosen"]["label"]
    assert {row["measured_prompts"] for row in everything["settings"]} == {len(PROMPTS)}
    assert len(everything["settings"]) > 200


def test_settings_take_turns_with_vanilla_and_the_best(command, scripted, tmp_path):
    command("--tau", "0.75", "--max-spec-len", "none", "--repeats", "3")
    turns = [json.loads(line) for line in (tmp_path / "out" / RECORDS).read_text().splitlines()[1:]]
    assert all("vanilla" in turn["answers"] for turn in turns)
    assert all(turn["answers"]["vanilla"]["equal"] for turn in turns)
    assert len([turn for turn in turns if "lookup" in turn["answers"]]) == 3 * len(PROMPTS)
    best = "wide, N 4, tau 0.75, lookup 3, gain 0.5"
    beside = [turn for turn in turns if best in turn["answers"]]
    assert len(beside) > 4 * len(PROMPTS)  # verified thrice, and its rivals beside it
    first = [next(iter(turn["answers"])) == "vanilla" for turn in turns]
    assert 0.3 < sum(first) / len(first) < 0.7  # every other turn is reversed


def test_what_is_slower_is_said(command, scripted, tmp_path, capsys):
    scripted.top = 0.9
    assert command("--spec-len", "4")[0] == 0
    said = capsys.readouterr().err
    assert "vanilla was faster, 1.00 against 0.9" in said and "use --method lookup" in said


def test_a_killed_run_goes_on(command, scripted, tmp_path, capsys):
    assert command("--spec-len", "3,4", out="whole")[0] == 0
    whole = len(scripted.given)
    records = tmp_path / "out" / RECORDS
    before = b""
    for answers in (5, 60):
        scripted.given.clear()
        scripted.fail_after = answers
        status, summary = command("--spec-len", "3,4")
        assert status == 130 and summary is None and "goes on from" in capsys.readouterr().err
        assert records.read_bytes().startswith(before)
        before = records.read_bytes()
        records.write_bytes(before + b'{"kind": "timed t')  # as a kill leaves it
    scripted.fail_after = None
    assert command("--spec-len", "3,4", "--minutes", "1e-9")[0] == UNFINISHED
    assert "cut off" in capsys.readouterr().err
    scripted.given.clear()
    status, summary = command("--spec-len", "3,4")
    assert status == 0 and len(scripted.given) < whole - 50
    assert {name: summary["chosen"][name] for name in BEST} == BEST
    assert records.read_bytes().startswith(before)
    done = records.read_bytes()
    scripted.given.clear()
    assert command("--spec-len", "3,4")[0] == 0 and not scripted.given  # everything is there
    assert records.read_bytes() == done


def test_the_choice_is_written_into_the_folder(command, scripted, tmp_path, capsys):
    folder = tmp_path / "drafter"
    shutil.copytree(tune.embedded_drafter(), folder)
    assert command("--drafter", str(folder), "--write")[0] == 0
    assert json.loads((folder / "config.json").read_text())["decoding"]["cpu"] == {"policy": "fixed", **BEST}
    assert command("--drafter", str(tmp_path), "--write")[0] == 2
    assert f"--write: {tmp_path} is not a drafter's folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_pair(command, extended, tmp_path):
    few = "--spec-len 2 --tau 0.3,0.8 --lookup-min 2 --min-gain 0 --max-spec-len none --limit 2"
    status, summary = command(*few.split(), "--full-sweep")
    assert status == 0 and len(summary["settings"]) == 2
    for row in summary["settings"]:
        equal, _, answers = row["answers_equal_to_vanilla"].split()
        assert equal == answers and int(answers) >= 2 == row["measured_prompts"]
        assert row["measured_speedup"] > 0 and row["measured_tokens"] >= row["measured_rounds"] > 0
    engine = FailFast(extended.target, extended.drafter, settings=tmp_path / "out" / tune.TUNED)
    assert engine.decoding == {"policy": "fixed"} | {k: v for k, v in summary["chosen"].items() if k in engine.decoding}


def test_settings_that_come_to_the_same(extended, standalone):
    def count(engine, **given):
        values = {name: (default[0],) for name, default in grid.default_grid(engine).items()}
        return [setting.label for setting in grid.settings_of(values | given, engine)]

    taus = (0.3, 0.6)
    assert count(extended, spec_len=(2, ROWS), tau=taus) == [
        "wide, N 2, tau 0.3",
        "wide, N 2, tau 0.6",
        f"wide, N {ROWS}",
    ]
    assert count(extended, spec_len=(ROWS,), max_spec_len=(None, ROWS)) == [f"wide, N {ROWS}"]
    assert len(count(extended, lookup_min=(0, 2), min_gain=(0.0, 1.0))) == 3
    assert len(count(standalone, schedule=("wide", "aligned"), lookup_min=(0, 2))) == 3
    assert count(standalone, spec_len=(8,), max_spec_len=(15,), tau=taus) == ["wide, N 8, max 15"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--tau 0.5,x", "--tau 'x': must be a number"),
        ("--tau 1.5", "--tau 1.5: must be in"),
        ("--spec-len ,", "--spec-len ',': holds no value"),
        ("--spec-len 9", "--spec-len 9: this drafter fills up to 5"),
        ("--spec-len 4 --max-spec-len 3", "the grid is empty"),
        ("--schedule aligned", "--schedule aligned: needs a standalone"),
        ("--verify 0", "--verify 0: must be at least 1"),
        ("--minutes 0", "--minutes 0.0: must be positive"),
        ("--max-new-tokens 500", "prompt 0 has 8 tokens: with --max-new-tokens 500"),
        ("--prompts no.jsonl", "no such file"),
    ],
)
def test_bad_input_is_named(args, message, command, capsys, tmp_path):
    assert command(*args.split())[0] == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out" / RECORDS).exists()


def test_records_of_other_models_are_refused(command, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORDS).write_text('{"kind": "run", "session": 0, "identity": {"dtype": "bfloat16"}}\n')
    assert command()[0] == 2
    assert "made with other settings (dtype" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dspark_qwen3_a", "dflash_qwen3_a", "deepspec_eagle3_qwen3_a"])
def test_published_drafters_have_a_grid(name):
    engine = FailFast(GOLDEN / "field" / "qwen3_a", GOLDEN / "field" / name)
    found = grid.settings_of(grid.default_grid(engine) | {"tau": (0.45,), "lookup_min": (0,)}, engine)
    assert len({setting.spec_len for setting in found}) >= 4 and {setting.schedule for setting in found} == {"wide"}
