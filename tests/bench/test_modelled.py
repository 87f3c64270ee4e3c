"""The paper's latency model, and the theory's."""

import numpy as np
import pytest

from failfast_jax.bench import modelled
from failfast_jax.bench.figures import theory_curves


def test_what_the_paper_says_of_its_speedups():
    """Abstract and section 5: 3.1 to 4.9 on the 32B target, 1.3 to 2.1 x the AR drafter, 1.2 to 1.7 x Fast-dLLM."""
    rows = [line.strip("| ").split(" | ") for line in modelled.table().splitlines()[2:]]
    found = {(target, name): np.asarray(cells, float) for target, name, *cells in rows}
    assert found["qwen2.5-32b", "FailFast"][0] == 4.94 and found["qwen2.5-14b", "FailFast"][0] == 3.97  # MATH
    assert 3.1 <= found["qwen2.5-32b", "FailFast"].min() and found["qwen2.5-32b", "FailFast"].max() < 4.95
    for target in ("qwen2.5-32b", "qwen2.5-14b"):
        over_ar, over_dllm = (found[target, "FailFast"] / found[target, name] for name in ("AR drafter", "Fast-dLLM"))
        assert 1.25 < over_ar.min() and over_ar.max() < 2.1
        assert 1.15 < over_dllm.min() and over_dllm.max() < 1.7


def test_latencies():
    assert modelled.parse_latency("14B").target_step == 24.7
    assert modelled.parse_latency("2:10").speedup(tokens=30, rounds=5, passes=10) == 30 * 10 / (20 + 50)
    assert modelled.latency_for("models/qwen2.5-7b-instruct-4bit").target_step == 13.5
    assert modelled.latency_for(None).target_step == 52.6
    for text in ("8B", "0:0", "1", "-1:5", "a:b"):
        with pytest.raises(ValueError, match=f"--modelled {text}: must be DRAFT:TARGET"):
            modelled.parse_latency(text)


def test_the_theorem():
    assert modelled.expected_speedup(0.0, 8, 0.0) == 1.0
    assert modelled.expected_speedup(1.0, 8, 1.0) == 4.5
    # Simulated: tokens of a round, over what it costs.
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((200_000, 5)) < 0.8, axis=1).sum(1)
    assert modelled.expected_speedup(0.8, 5, 0.5) == pytest.approx((accepted.mean() + 1) / 1.5, rel=5e-3)
    assert modelled.alpha_of(accepted.mean() / 5, 5) == pytest.approx(0.8, abs=5e-3)
    # Fig. 2 of the paper: best draft lengths 8 and 16, speedups of about 3.0 and 5.2.
    lengths = modelled.THEORY_LENGTHS
    ar, dllm = theory_curves().values()
    assert lengths[int(np.argmax(ar))] == 8 and max(ar) == pytest.approx(3.0, abs=0.1)
    assert lengths[int(np.argmax(dllm))] == 16 and max(dllm) == pytest.approx(5.2, abs=0.1)
