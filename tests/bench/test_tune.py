"""The tuner: what it predicts against what the engine does, its files, and its answers to bad input."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_models import diffusion_config, random_bound, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import predict, tune
from failfast_jax.bench.grid import Grid, Setting
from failfast_jax.bench.predict import Costs, Recordings
from failfast_jax.bench.recorded import Drafts, KnownAnswer, Recorder
from failfast_jax.bench.tuner import RECORDS, Tuner
from failfast_jax.checkpoints.tuned import TunedOptions, model_key, read_settings, write_settings
from failfast_jax.decoding import plan
from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.feature_block import ConditionedDrafter
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.generate import main

TOKENS = 48
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], np.random.default_rng(0).integers(2, 39, 21).tolist(), [9]]
ROWS = 5


@pytest.fixture(scope="module")
def target():
    return random_model(tiny_config())


@pytest.fixture(scope="module")
def conditioned(target):
    return FailFast(target, random_bound(target, rows=ROWS))


@pytest.fixture(scope="module")
def standalone(target):
    return FailFast(target, random_model(diffusion_config(), seed=2))


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    """Lookups as on an accelerator: short enough for the drafter to go on behind them. One verify width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CPU_LADDER", (8, 16, 128))
        patch.setattr(Lookup, "on", lambda platform, longest=None, **o: Lookup(max_spec_len=longest or 7, **o))
        # Compiling is most of what these tests do.
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def answers(conditioned):
    """`vanilla`'s, which need no drafter."""
    options = {"method": "vanilla", "max_new_tokens": TOKENS}
    return [conditioned.generate([prompt], **options)[0].output_ids for prompt in PROMPTS]


def make_tuner(engine, folder, grid, answers=()):
    tuner = Tuner(engine, PROMPTS, grid, TOKENS, folder)
    for number, ids in enumerate(answers):
        tuner.records.add("answer", str(number), ids)
    return tuner


def predicted(tuner, batch=1):
    """Rounds of every candidate on every prompt."""
    recorder = Recorder(tuner.engine, tuner.answers(), [c.drafter for c in tuner.candidates], batch=batch)
    recordings = tuner.recordings(recorder)
    return {c.setting: recordings.rounds_under(c.setting, c.drafter) for c in tuner.candidates}


def real(engine, prompt, setting):
    config = GenerationConfig(max_new_tokens=TOKENS, **setting.options())
    rounds = engine.generate([prompt], config)[0].rounds
    return [predict.Replayed(len(r.drafted), min(r.accepted, len(r.emitted)), len(r.emitted), r.passes) for r in rounds]


def check(tuner, settings, batch=1):
    """Every predicted round is the engine's; returns the kinds of rounds that occurred."""
    found = predicted(tuner, batch)
    kinds = set()
    for setting in settings:
        for prompt, rounds in zip(PROMPTS, found[setting]):
            assert rounds == real(tuner.engine, prompt, setting), (setting, prompt)
            kinds |= {(r.drafted, r.passes, min(r.accepted, 2)) for r in rounds}
    return kinds


def test_the_prediction_is_the_engine_conditioned(conditioned, tmp_path):
    grid = Grid(("wide",), (2,), (0.1, 0.3, 0.8), (None,), (0, 2), (0.0, 0.5, 1.0))
    tuner = make_tuner(conditioned, tmp_path, grid)
    assert len(tuner.candidates) == 12
    kinds = check(tuner, [c.setting for c in tuner.candidates])
    assert {(2, 1), (4, 2), (5, 3)} <= {k[:2] for k in kinds}, kinds  # short, grown and longest drafts
    assert any(drafted > 3 and 0 < passes < 3 for drafted, passes, _ in kinds)  # a lookup carried on
    assert any(drafted == 0 for drafted, *_ in kinds)  # not worth verifying
    assert {0, 2} <= {accepted for *_, accepted in kinds}


def test_the_prediction_is_the_engine_standalone(standalone, answers, tmp_path):
    grid = Grid(("wide", "aligned"), (3,), (0.2, 0.6), (6,), (0, 2), (0.0, 1.0))
    tuner = make_tuner(standalone, tmp_path, grid, answers)
    # Of the settings without lookups only those that also walk on their own: each kind is a compilation.
    settings = [c.setting for c in tuner.candidates if c.setting.lookup_min or c.setting.schedule == "aligned"]
    assert len(settings) == 6
    kinds = check(tuner, settings, batch=2)
    assert {(3, 1), (6, 2), (6, 1), (0, 1)} <= {k[:2] for k in kinds}, kinds  # (6, 1): half a lookup's


def test_an_answer_that_stops(conditioned, tmp_path, monkeypatch):
    """Rounds end at a stop token, wherever in a draft it stands."""
    plain = conditioned.generate([PROMPTS[0]], method="vanilla", max_new_tokens=TOKENS, ignore_eos=True)[0]
    monkeypatch.setattr(conditioned, "eos_token_ids", (plain.output_ids[20],))
    grid = Grid(("wide",), (2,), (0.1, 0.8), (None,), (0,), (0.0,))
    tuner = make_tuner(conditioned, tmp_path, grid)
    check(tuner, [c.setting for c in tuner.candidates])
    assert len(tuner.answers()[0].answer) <= 21


def recorded(text, tokens, confidence, drafted, passes, agreed):
    """Drafts as a recording of every position holds them."""
    return Drafts(
        tokens=np.asarray(tokens, np.int32),
        confidence=np.asarray(confidence, np.float32),
        drafted=np.asarray(drafted, np.int32),
        passes=np.asarray(passes, np.int32),
        agreed=np.asarray(agreed, np.int32),
        visited=len(text.prompt) + np.arange(len(text.answer), dtype=np.int32),
    )


def test_prediction_adds_up(target):
    text = KnownAnswer((1, 2), (3, 4, 5, 6))
    drafts = recorded(
        *(text, [[3, 9, 9, 9], [9, 9, 0, 0], [5, 6, 9, 9], [6, 9, 9, 9]]),
        [[0.9, 0.9, 0.9, 0.9], [0.9, 0.2, 0, 0], [0.9, 0.9, 0.1, 0.9], [1, 1, 1, 1]],
        *([4, 2, 4, 4], [2, 1, 2, 2], [1, 0, 2, 1]),
    )
    drafted, passes = predict.cut(drafts, 0, 2, 4, whole=False, tau=0.5)
    assert drafted.tolist() == [4, 2, 4, 4] and passes.tolist() == [2, 1, 2, 2]
    drafted, passes = predict.cut(drafts, 0, 2, 3, whole=True, tau=0.5)
    assert drafted.tolist() == [2, 2, 2, 2] and passes.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="tau 0.1 is too small"):
        predict.cut(drafts, 0, 2, 4, whole=False, tau=0.1)
    none = np.zeros(4, np.int32)
    recordings = Recordings([text], {("wide-2", 0): [drafts]}, [(none, none)])
    rule = BelowThreshold(np.float32(0.5))
    drafter = ConditionedDrafter(model=random_bound(target, rows=4), rule=rule, spec_len=2, max_spec_len=4)
    costs = Costs(vanilla=1.0, verify={4: 1.5, 8: 2.0}, drafts={"wide-2": (0.05, 0.1)}, lookup=9.0)
    got = predict.predict(recordings, Setting("wide", 2, 0.5), drafter, (4, 8), costs)
    # Two rounds: 4 drafted, 1 accepted; 4 drafted, 2 accepted of which 2 became output.
    assert (got.rounds, got.tokens, got.passes, got.accepted) == (2, 4, 4, 3)
    assert got.seconds == pytest.approx(2 * 2.0 + 4 * 0.1 + 2 * 0.05)
    assert got.speedup == pytest.approx(4 / got.seconds)
    with pytest.raises(ValueError, match="no drafts of wide-3 behind 0 tokens were recorded"):
        recordings.rounds_under(Setting("wide", 3, 0.5), drafter.replace(spec_len=3))


def test_a_lookup_is_the_engines():
    """Continuations that reach the end of the text go on with themselves."""
    text = KnownAnswer((7, 8, 7), (8, 7, 8, 9))
    match = np.asarray([1, 2, 3, 4], np.int32)
    recordings = Recordings([text], {}, [(match, match)])
    lookup = Lookup(min_match=1, shortest=6, max_spec_len=6)
    assert recordings.rounds_with(recordings.recorded_lookup(lookup)) == [[predict.Replayed(6, 3, 4, 0)]]


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


def test_the_engine_takes_the_file(target, conditioned, tmp_path, caplog):
    path = settings_file(conditioned, tmp_path / "tuned.json", lookup_min=0)
    engine = FailFast(target, conditioned.drafter, settings=path)
    drafter = engine.build_drafter(GenerationConfig())
    assert (drafter.spec_len, drafter.max_spec_len, float(drafter.rule.tau)) == (2, 2, 1.0)
    explicit = engine.build_drafter(GenerationConfig(spec_len=3, tau=0.5))
    assert (explicit.spec_len, float(explicit.rule.tau)) == (3, 0.5)
    assert not caplog.records
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "machine": {"platform": "tpu", "device": "TPU v5e"}}))
    FailFast(target, conditioned.drafter, settings=path)
    assert "tuned on another machine, platform 'tpu' (here 'cpu')" in caplog.text


def test_a_schedule_in_the_file(target, standalone, tmp_path):
    path = settings_file(standalone, tmp_path / "tuned.json", schedule="aligned", spec_len=3, max_spec_len=9)
    engine = FailFast(target, standalone.drafter, settings=path)
    assert isinstance(engine.build_drafter(GenerationConfig()), Aligned)
    wide = engine.build_drafter(GenerationConfig(schedule="wide"))
    assert isinstance(wide, Wide) and wide.spec_len == 10  # the file is not for that schedule
    assert engine.decoding["schedule"] == "aligned"
    assert isinstance(standalone.build_drafter(GenerationConfig()), Wide)


def test_files_of_other_pairs_are_refused(target, conditioned, standalone, tmp_path):
    path = settings_file(conditioned, tmp_path / "tuned.json")
    other = random_model(tiny_config(num_layers=3))
    with pytest.raises(ConfigError, match=r"tuned.json: .* for the target T; the target model has num_layers 3, not 2"):
        FailFast(other, random_bound(other, rows=ROWS), settings=path)
    other = random_model(tiny_config(), seed=5)
    with pytest.raises(ConfigError, match="for the target T; the target model has other weights"):
        FailFast(other, random_bound(other, rows=ROWS), settings=path)
    with pytest.raises(ConfigError, match="for the drafter D; the drafter model has other weights"):
        FailFast(target, random_bound(target, rows=ROWS, seed=7), settings=path)
    with pytest.raises(ConfigError, match="for the drafter D; the drafter model has context_layers None"):
        FailFast(target, standalone.drafter, settings=path)
    with pytest.raises(ConfigError, match="no drafter is loaded"):
        FailFast(target, settings=path)


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
def test_damaged_files_are_named(conditioned, tmp_path, change, message):
    path = settings_file(conditioned, tmp_path / "tuned.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"tuned.json: .*{message}"):
        FailFast("before any model is read", settings=path)


def test_the_command_line_takes_the_file(capsys, tmp_path, golden_model, monkeypatch):
    folders = GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied"
    pair = types.SimpleNamespace(target=golden_model(folders[0].name), drafter=golden_model(folders[1].name))
    path = str(settings_file(pair, tmp_path / "tuned.json", schedule="aligned"))
    request = ["--target", str(folders[0]), "--settings", path, "--token-ids", "7,12", "--json"]

    def said(engine, prompts, config):
        drafter = engine.build_drafter(config)
        raise ValueError(
            f"{type(drafter).__name__} {drafter.spec_len} {drafter.max_spec_len} {float(drafter.rule.tau)}"
        )

    monkeypatch.setattr(FailFast, "generate", said)
    assert main([*request, "--drafter", str(folders[1])]) == 2
    assert capsys.readouterr().err == "error: Aligned 2 2 1.0\n"
    assert main([*request, "--drafter", str(folders[1]), "--schedule", "wide", "--spec-len", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: Wide 3 60 0.4")
    assert main([*request, "--drafter", str(folders[0])]) == 2
    assert "tuned.json: these settings were tuned for the drafter D" in capsys.readouterr().err


def test_settings_are_for_one_method(capsys, tmp_path):
    assert main(["--prompt", "x", "--method", "vanilla", "--settings", "t.json"]) == 2
    assert "--settings t.json: only --method failfast takes tuned settings" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="t.json: no such file"):
        read_settings(tmp_path / "t.json")


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def command(conditioned, tmp_path, monkeypatch):
    """Runs the command with a tiny pair; returns its status and the summary."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS[:2]))
    monkeypatch.setattr(tune, "load_pair", lambda *_, **__: conditioned)
    monkeypatch.setattr(conditioned, "decoding", {})

    def run(*args, out="out"):
        grid = "--spec-len 2 --tau 0.3,0.8 --lookup-min 0,2 --min-gain 0 --max-spec-len none --max-new-tokens 20"
        fixed = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / out), *grid.split()]
        status = bench.main(["tune", *fixed, "--cost-repeats", "1", *args])
        path = tmp_path / out / tune.SUMMARY
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


def test_the_command(command, conditioned, tmp_path, capsys, monkeypatch):
    """Interrupted in the middle of the sweep it goes on, and answers nothing twice."""
    generate, calls = FailFast.generate, []

    def counted(self, prompts, config=None, **options):
        calls.append(config.method)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return generate(self, prompts, config, **options)

    monkeypatch.setattr(FailFast, "generate", counted)
    stop_at = 12
    status, summary = command("--full-sweep")
    assert status == 130 and summary is None and "goes on from" in capsys.readouterr().err
    records = tmp_path / "out" / RECORDS
    records.write_text(records.read_text() + '{"kind": "ans')  # as a kill leaves it
    stop_at = 0
    status, summary = command("--full-sweep")
    assert status == 0
    assert "cut off" in capsys.readouterr().err
    assert len(summary["settings"]) == 4
    assert all(row["predicted_speedup"] > 0 for row in summary["settings"])
    measured = [row for row in summary["settings"] if "measured_speedup" in row]
    assert len(measured) == 2
    for row in measured + summary["sweep"]["settings"]:
        assert row["measured_rounds"] == row["rounds"] and row["answers_equal_to_vanilla"] == "2 of 2"
        assert row["error"] == pytest.approx(row["predicted_speedup"] / row["measured_speedup"] - 1)
    assert summary["chosen"]["measured_speedup"] == max(row["measured_speedup"] for row in measured)
    assert 0 < summary["sweep"]["choice_over_best"] <= 1
    engine = FailFast(conditioned.target, conditioned.drafter, settings=tmp_path / "out" / tune.TUNED)
    assert engine.decoding == {k: v for k, v in summary["chosen"].items() if k in engine.decoding}
    count = len(calls)
    assert command("--full-sweep")[0] == 0 and len(calls) == count  # everything is there


def test_bad_input_is_named(command, capsys, tmp_path):
    for args, message in (
        (["--tau", "0.5,x"], "--tau 0.5,x: must be numbers"),
        (["--tau", "1.5"], "--tau 1.5: must be in"),
        (["--spec-len", ""], "--spec-len '': holds no value"),
        (["--spec-len", "9"], "--spec-len 9: this drafter was trained for drafts of up to 5"),
        (["--spec-len", "4", "--max-spec-len", "3"], "the grid is empty"),
        (["--schedule", "aligned"], "--schedule aligned: needs a standalone"),
        (["--verify", "0"], "--verify 0: must be at least 1"),
        (["--max-new-tokens", "500"], "prompt 0 has 8 tokens: with --max-new-tokens 500"),
        (["--prompts", "no.jsonl"], "no such file"),
    ):
        status, _ = command(*args, out="bad")
        assert status == 2 and message in capsys.readouterr().err, args
    assert not (tmp_path / "bad" / RECORDS).exists()
    (tmp_path / "bad").mkdir(exist_ok=True)
    (tmp_path / "bad" / RECORDS).write_text('{"kind": "run", "session": 0, "identity": {"dtype": "bfloat16"}}\n')
    assert command(out="bad")[0] == 2
    assert "made with other settings (dtype" in capsys.readouterr().err


def test_options_of_the_engine_stay(conditioned):
    with pytest.raises(OptionError, match="--schedule tall"):
        conditioned.generate([[1, 2]], schedule="tall")
