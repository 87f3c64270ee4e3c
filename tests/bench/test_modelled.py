"""The paper's latency model, and the theory's."""

import numpy as np
import pytest

from failfast_jax.bench import speedup_model
from failfast_jax.bench.figures import theory_curves


def test_latencies():
    assert speedup_model.parse_latency("14B").target_step == 24.7
    assert speedup_model.parse_latency("2:10").speedup(tokens=30, rounds=5, passes=10) == 30 * 10 / (20 + 50)
    assert speedup_model.latency_for("models/qwen2.5-7b-instruct-4bit").target_step == 13.5
    assert speedup_model.latency_for(None).target_step == 52.6
    for text in ("8B", "0:0", "1", "-1:5", "a:b"):
        with pytest.raises(ValueError, match=f"--modelled {text}: must be DRAFT:TARGET"):
            speedup_model.parse_latency(text)


def test_the_theorem():
    assert speedup_model.expected_speedup(0.0, 8, 0.0) == 1.0
    assert speedup_model.expected_speedup(1.0, 8, 1.0) == 4.5
    # Simulated: tokens of a round, over what it costs.
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((200_000, 5)) < 0.8, axis=1).sum(1)
    assert speedup_model.expected_speedup(0.8, 5, 0.5) == pytest.approx((accepted.mean() + 1) / 1.5, rel=5e-3)
    assert speedup_model.alpha_of(accepted.mean() / 5, 5) == pytest.approx(0.8, abs=5e-3)
    # Fig. 2 of the paper: best draft lengths 8 and 16, speedups of about 3.0 and 5.2.
    lengths = speedup_model.THEORY_LENGTHS
    ar, dllm = theory_curves().values()
    assert lengths[int(np.argmax(ar))] == 8 and max(ar) == pytest.approx(3.0, abs=0.1)
    assert lengths[int(np.argmax(dllm))] == 16 and max(dllm) == pytest.approx(5.2, abs=0.1)
