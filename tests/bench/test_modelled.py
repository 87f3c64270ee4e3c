"""The paper's latency model, and the theory's."""

import numpy as np
import pytest

from failfast_jax.bench import modelled
from failfast_jax.bench.figures import theory_curves
from failfast_jax.bench.published import appendix_b


@pytest.mark.parametrize(("target", "published"), [("Qwen2.5-32B-Instruct", 4.94), ("Qwen2.5-14B-Instruct", 3.97)])
def test_the_published_speedups_on_math(target, published):
    assert modelled.paper_speedup(target, "failfast", "MATH") == pytest.approx(published, abs=0.005)


def test_what_the_paper_says_of_its_speedups():
    """Abstract and section 5: 3.1 to 4.9 on the 32B target, 1.3 to 2.1 x the AR drafter, 1.2 to 1.7 x Fast-dLLM."""
    datasets = list(appendix_b()["Qwen2.5-32B-Instruct"]["failfast"])
    large = {d: modelled.paper_speedup("Qwen2.5-32B-Instruct", "failfast", d) for d in datasets}
    assert 3.1 <= min(large.values()) and max(large.values()) < 4.95
    for target in ("Qwen2.5-32B-Instruct", "Qwen2.5-14B-Instruct"):
        ours, ar, dllm = (
            np.asarray([modelled.paper_speedup(target, method, d) for d in datasets])
            for method in ("failfast", "ar", "fast_dllm")
        )
        assert 1.25 < (ours / ar).min() and (ours / ar).max() < 2.1
        assert 1.15 < (ours / dllm).min() and (ours / dllm).max() < 1.7
    assert modelled.table().count("4.94") == 1


def test_latencies():
    assert modelled.parse_latency("14B") == modelled.authors_latency("Qwen2.5-14B-Instruct")
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
    lengths = range(2, 60)
    ar, dllm = theory_curves(lengths).values()
    assert lengths[int(np.argmax(ar))] == 8 and max(ar) == pytest.approx(3.0, abs=0.1)
    assert lengths[int(np.argmax(dllm))] == 16 and max(dllm) == pytest.approx(5.2, abs=0.1)
