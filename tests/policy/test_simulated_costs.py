"""The policy and fixed settings over known answers, on simulated machines."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import simulated_costs
from simulated_costs import DraftedAnswer, Setting, by_policy, fixed_steps, inputs, places, simulate, verify_costs
from tiny_engines import engine

from failfast_jax import GenerationConfig
from failfast_jax.policy.expected_tokens import BINS, Costs

PERIOD = [5, 6, 7, 8, 9]


@pytest.fixture
def answer() -> DraftedAnswer:
    """A text that repeats itself, and a drafter that is right about its next token only."""
    prompt, output = PERIOD * 2, (PERIOD * 8)[:36]
    drafted = [[token, 1, 1] for token in output]
    return DraftedAnswer(prompt, output, drafted, [[0.9, 0.8, 0.2]] * len(output))


def costs(verify, drafter_pass: float) -> Costs:
    return Costs(np.asarray(verify, np.float32), np.float32(drafter_pass), np.int32(0), np.int32(0))


def test_fixed_settings_are_counted_by_hand(answer):
    answered, verify = places(answer), [1.0, 1.5, 2.0, 3.0]
    assert len(answered) == 36 and answered[0] == (5, 15, 1, [0.9, 0.8, 0.2])
    assert answered[-1].text_right == 1  # no more is left
    assert fixed_steps(answered, verify, 0.5, Setting(99, 3, 0, 0.0)) == 36
    assert fixed_steps(answered, verify, 0.5, Setting(1, 7, 0, 0.0)) == 5 * 2.0  # 8 tokens a round, at last 4
    assert fixed_steps(answered, verify, 0.5, Setting(99, 3, 3, 0.6)) == 18 * (1.5 + 0.5)  # two drafted, one right


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
    monkeypatch.setattr(simulated_costs, "LEARNED", 20)
    anew = jax.jit(lambda *arguments: by_policy.__wrapped__(*arguments))
    again = anew(*arrays, costs([1, 50, 60, 70], 40.0))
    everything, late = np.asarray(again.known)[..., 0].sum((1, 2))
    assert 0 < late < everything


def test_the_policy_beside_the_best_fixed_setting(answer, monkeypatch):
    monkeypatch.setattr(simulated_costs, "VERIFY_8", (1.0, 3.0))
    monkeypatch.setattr(simulated_costs, "PASS", (0.3,))
    cheap, dear = simulate([answer, answer])["machines"]
    assert cheap["its speed"] >= dear["its speed"] > 1
    for row in (cheap, dear):
        assert row["auto / best"] == pytest.approx(row["auto"] / row["its speed"])
        assert row["slowest question"] > 0.9
    assert verify_costs(3.0)[2] == pytest.approx(3.0) and verify_costs(1.0) == [1, 1, 1, 1]


@pytest.mark.long
def test_an_answer_with_drafts_at_every_place():
    pair = engine()
    drafter = pair.build_drafter(GenerationConfig("failfast", spec_len=3, max_spec_len=3))
    answered = simulated_costs.answer(pair, drafter, [7, 12, 30], 24)
    assert answered.output == pair.generate([[7, 12, 30]], method="vanilla", max_new_tokens=24)[0].output_ids
    assert len(answered.drafted) >= len(answered.output) - 1 and len(answered.drafted[0]) == 3
