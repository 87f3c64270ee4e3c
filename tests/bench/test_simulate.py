"""`bench simulate`: the policy and fixed settings over known answers."""

import json

import jax
import numpy as np
import pytest

from failfast_jax.bench import simulate
from failfast_jax.bench.__main__ import main
from failfast_jax.bench.simulate import Answer, by_policy, fixed_steps, inputs, places, simulated, steps_of
from failfast_jax.decoding.economics import BINS, Costs

PERIOD = [5, 6, 7, 8, 9]


@pytest.fixture
def answer() -> Answer:
    """A text that repeats itself, and a drafter that is right about its next token only."""
    prompt, output = PERIOD * 2, (PERIOD * 8)[:36]
    drafted = [[token, 1, 1] for token in output]
    return Answer(prompt, output, drafted, [[0.9, 0.8, 0.2]] * len(output))


def costs(verify, drafter_pass: float) -> Costs:
    return Costs(np.asarray(verify, np.float32), np.float32(drafter_pass), np.int32(0), np.int32(0))


def test_places_say_what_drafts_would_have_done(answer):
    found = places(answer)
    assert len(found) == 36
    match, right, own, confidence = found[0]
    assert (match, right, own, confidence) == (5, 15, 1, [0.9, 0.8, 0.2])
    assert found[-1][1] == 1  # no more is left


def test_fixed_settings_are_counted_by_hand(answer):
    found, verify = places(answer), [1.0, 1.5, 2.0, 3.0]
    assert fixed_steps(found, verify, 0.5, (99, 3, 0, 0.0)) == 36
    assert fixed_steps(found, verify, 0.5, (1, 7, 0, 0.0)) == 5 * 2.0  # 8 tokens a round, at last 4
    assert fixed_steps(found, verify, 0.5, (99, 3, 3, 0.6)) == 18 * (1.5 + 0.5)  # two drafted, one right


def test_the_policy_drafts_what_pays(answer, monkeypatch):
    arrays = inputs(answer, 128)
    dear = by_policy(*arrays, costs([1, 50, 60, 70], 40.0))
    assert float(dear.steps) == int(dear.rounds) == 36
    hopeless = by_policy(*arrays, costs([1, 1, 1, 1], 0.1), prior=(1e-6,) * BINS)
    assert hopeless.steps >= by_policy(*arrays, costs([1, 1, 1, 1], 0.1)).steps
    free = by_policy(*arrays, costs([1, 1, 1, 1], 0.0))
    assert float(free.steps) == int(free.rounds) < 8
    assert 0 < np.asarray(free.known)[0, 0, :, 2].sum() <= 36
    assert not np.asarray(dear.known)[1].any()  # 36 rounds are too few to know chances by
    monkeypatch.setattr(simulate, "LEARNED", 20)
    anew = jax.jit(lambda *arguments: by_policy.__wrapped__(*arguments))
    again = anew(*arrays, costs([1, 50, 60, 70], 40.0))
    everything, late = np.asarray(again.known)[..., 0].sum((1, 2))
    assert 0 < late < everything


def test_a_summary_compares_with_the_best_fixed_setting(answer, monkeypatch):
    monkeypatch.setattr(simulate, "VERIFY_8", (1.0, 3.0))
    monkeypatch.setattr(simulate, "PASS", (0.3,))
    cheap, dear = simulated([answer, answer])["machines"]
    assert cheap["best_fixed_speedup"] >= dear["best_fixed_speedup"] > 1
    for row in (cheap, dear):
        assert row["auto_over_best"] == pytest.approx(row["auto_speedup"] / row["best_fixed_speedup"])
        assert row["auto_slowest_question"] > 0.9
    assert steps_of(3.0)[2] == pytest.approx(3.0) and steps_of(1.0) == [1, 1, 1, 1]


@pytest.mark.long
def test_the_command_goes_on_from_what_is_answered(tmp_path, capsys, monkeypatch):
    from checkpoint_files import GOLDEN

    monkeypatch.setattr(simulate, "VERIFY_8", (2.0,))
    monkeypatch.setattr(simulate, "PASS", (0.3,))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [7, 12, 100, 5 + i]}) + "\n" for i in range(2)))
    models = ["--target", str(GOLDEN / "qwen2_target_211"), "--drafter", str(GOLDEN / "fast_dllm_v2_tied")]
    command = ["simulate", *models, "--dataset", str(prompts), "--max-new-tokens", "24", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "| verify of 8 |" in capsys.readouterr().out
    first = (tmp_path / "out" / "answers.jsonl").read_bytes()
    assert main(command) == 0
    assert (tmp_path / "out" / "answers.jsonl").read_bytes() == first
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["machines"][0]["auto_speedup"] > 0
