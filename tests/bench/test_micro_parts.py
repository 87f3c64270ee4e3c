"""Parts of `bench micro` that time a model's passes, on a tiny one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_engines import engine, standalone_engine
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import cpu_kernels, micro
from failfast_jax.bench.serving import METHODS, serving_report
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels import cpu_product, llvm_emitter
from failfast_jax.util import hardware


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(hardware, "bandwidth", lambda nbytes: {"read": 1e9})
    for module in (micro, cpu_kernels):
        monkeypatch.setattr(module, "WIDTHS", (1, 4))
        monkeypatch.setattr(module, "REPEATS", 1)
    monkeypatch.setattr(cpu_kernels, "CONTEXTS", (160, 300))
    monkeypatch.setattr(cpu_kernels, "PROMPT", 144)
    monkeypatch.setattr(micro, "PROMPT_TOKENS", (5, 40))
    monkeypatch.setattr(micro, "CONTEXT", 16)
    monkeypatch.setattr(micro, "STEPS", 2)
    return random_model(tiny_config(head_dim=32))  # what prompts have a kernel for


def test_verifies_by_width(target):
    found = micro.widths_report(target)
    assert found["one_row_steps"][1] == 1 and found["ms"][4] > 0


def test_kernels_of_the_processor_beside_xlas(target):
    if llvm_emitter.vector_unit() is None:
        pytest.skip(cpu_product.NO_UNIT)
    found = cpu_kernels.report(target)
    assert {"reading_ms", "1", "4"} == set(found["products"]) and {"160", "300"} == set(found["attention"])
    for row in (found["products"]["4"], found["attention"]["300"]["16"], found["prompt"]["300"]):
        assert row["ours_ms"] > 0 and row["xla_ms"] > 0
    pairs = sum(156 + row + 1 for row in range(144))
    config = target.config
    assert np.isclose(
        found["prompt"]["300"]["gflop"] * 1e9, 4 * config.head_dim * config.num_heads * config.num_layers * pairs
    )


def test_prompts_by_length(target):
    engine = FailFast(target)
    found = micro.prefill_report(engine)
    assert set(found) == {"5", "40"} and all(row["ms"] > 0 and row["tokens_per_s"] > 0 for row in found.values())


def test_a_processor_that_has_no_kernels_is_named(target, monkeypatch):
    monkeypatch.setattr(llvm_emitter, "vector_unit", lambda: None)
    with pytest.raises(OptionError, match="--parts cpu: a processor without fused multiply-add"):
        cpu_kernels.report(target)


@pytest.mark.long
def test_the_report_of_a_queue():
    found = serving_report(engine(), ["what is it?", "and that?"], (2,), 48)
    assert set(found) == {"2"} and found["2"]["speedup"] > 0
    for method in METHODS:
        figures = found["2"][method]
        assert figures["tokens_per_s"] > 0 and min(figures["first_token_s"], figures["first_token_alone_s"]) > 0
        assert (figures["accepted_per_round"] == 0) == (method == "vanilla") and figures["request_overhead_s"] > 0


@pytest.mark.long
def test_operations_grow_with_the_rows():
    pair = standalone_engine()

    def costs(method, **options):
        config = GenerationConfig(method, max_new_tokens=8, **options)
        rows = pair.runtime.plan(pair.build_drafter(pair.resolve(config))).widths[-1]
        return micro.program_costs(pair, config, 9), rows

    (short, few), (long, many) = costs("specdiff", spec_len=7), costs("specdiff", spec_len=40)
    plain, one = costs("vanilla")
    assert one < few < many
    layers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(pair.target.layers)) if leaf.ndim > 1)
    assert plain["verify_flops"] > 2 * layers
    assert long["verify_flops"] / short["verify_flops"] == pytest.approx(many / few, rel=0.1)
    assert plain["pass_flops"] is None and plain["verify_flops"] < short["verify_flops"] / 4
    # Both models are held while either works.
    drafter = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(pair.drafter)))
    assert short["pass_flops"] > 0 and long["bytes"] >= short["bytes"] > plain["bytes"] + drafter
