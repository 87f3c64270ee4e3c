"""Parts of `bench micro` on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import micro
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.models import attention_check
from failfast_jax.util import hardware


def test_unknown_parts_are_named(capsys):
    assert bench.main(["micro", "--parts", "kernels,stamina"]) == 2
    assert "--parts: stamina: must be among speed, kernels" in capsys.readouterr().err


def test_parts(monkeypatch):
    monkeypatch.setattr(hardware, "bandwidth", lambda nbytes: {"read": 1e9})
    monkeypatch.setattr(micro, "WINDOWS", ((8, 125, 32),))
    monkeypatch.setattr(micro, "PROMPTS", ([3, 9, 27],))
    pair = FailFast(random_model(tiny_config(head_dim=32)))
    report = micro.kernels(pair)
    assert report["right"] and [check["rows"] for check in report["checks"]] == [8]
    monkeypatch.setattr(micro, "CPU_CONTEXTS", (64,))
    monkeypatch.setattr(micro, "TIMED_ROWS", (8,))
    monkeypatch.setattr(micro, "LAYERS", 2)
    [case] = micro.attention(pair)["times"]
    assert case["rows"] == 8 and case["ms"]["reference"] > 0
    # 64 positions, keys and values of two heads of 32 float32 numbers, at 1 GB/s
    assert case["reading_ms"] == pytest.approx(1e3 * 64 * 2 * 2 * 32 * 4 / 1e9)
    report = micro.speed(pair)
    share = report["vanilla_tokens_per_s"] / report["memory_limit_tokens_per_s"]
    assert report["share_of_memory_limit"] == pytest.approx(share)


def test_the_cost_of_rounding(monkeypatch):
    """Beside numpy's float64, from the logits of both arithmetics."""
    monkeypatch.setattr(micro, "humaneval_prompts", lambda limit: [[3, 9, 27], [4, 5]])
    monkeypatch.setattr(micro, "everyday_prompts", lambda: [[7, 8, 9, 10]])
    monkeypatch.setattr(micro, "ANSWER", 12)
    pair = FailFast(random_model(tiny_config(hidden_size=64, intermediate_size=96)), quantize="int4")
    report = micro.rounding(pair)
    assert [report[name]["answers"] for name in ("humaneval", "everyday")] == [2, 1]
    float32 = FailFast.load(pair, activations="float32", method="vanilla")
    [answer] = float32.generate([[7, 8, 9, 10]], method="vanilla", max_new_tokens=12)
    ids = [answer.prompt_ids + answer.output_ids]
    p, q = (np.asarray(engine.target.logits(ids)[0, 3:-1], np.float64) for engine in (float32, pair))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    figures = report["everyday"]
    assert figures["tokens"] == len(answer.output_ids)
    assert figures["top1_agreement"] == np.mean(p.argmax(-1) == q.argmax(-1)) > 0.5
    assert figures["mean_kl_nats"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """Plain attention in its place, but for the windows that are checked."""

    def wrong(qkv, cache, window, kernel="reference"):
        outputs, cache = attend(qkv, cache, window, kernel="reference")
        return outputs * (1.0 if kernel == "reference" else 1.05), cache

    monkeypatch.setattr(attention_check, "attend", wrong)
    [check] = micro.check_shapes({"small": (4, 2, 64)}, [(2, 30, 32)], kernel="cpu")
    assert not check["right"] and check["error"] > attention_check.TOLERANCE
    [failed] = micro.check_shapes({"impossible": (3, 0, 64)}, [(8, 0, 1)])
    assert not failed["right"] and failed["failed"].startswith("ZeroDivisionError")
