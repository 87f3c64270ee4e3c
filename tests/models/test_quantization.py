"""Models in blocks: what they compute, what they weigh, and that speculation stays lossless."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from flax import nnx
from tiny_engines import lossless
from tiny_models import random_extended, random_model, tiny_config

from failfast_jax import FailFast, load_model
from failfast_jax.defaults import load_pair
from failfast_jax.errors import OptionError
from failfast_jax.kernels.blocks import BlockMatrix
from failfast_jax.models.layers import Linear

PROMPT = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]


def linears(model) -> list[Linear]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]


def difference(actual, expected) -> float:
    """Root mean square of the difference between logits, over their standard deviation."""
    return np.sqrt(np.mean((np.asarray(actual) - expected) ** 2)) / np.std(expected)


@pytest.mark.parametrize(("scheme", "error"), [("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_stay_close_and_the_original_as_it_was(tied, scheme, error):
    model = random_model(tiny_config(hidden_size=64, intermediate_size=96, tie_embeddings=tied, mlp_bias=True))
    expected = np.asarray(model.logits([PROMPT]))
    small = model.quantized(scheme)
    assert all(isinstance(layer.weight[...], BlockMatrix) for layer in linears(small))
    assert len(linears(small)) == 2 * 4 + (not tied) and isinstance(small.embed[...], BlockMatrix)
    assert 1e-4 < difference(small.logits([PROMPT]), expected) < error
    assert small.quantized().embed[...].codes is small.embed[...].codes
    assert np.array_equal(model.logits([PROMPT]), expected)


@pytest.mark.parametrize("method", ["ar", "failfast"])
def test_lossless_against_the_quantised_target(method):
    target = random_model(tiny_config(hidden_size=64, intermediate_size=96))
    # Drafting with the target itself: everything is accepted.
    drafter = target if method == "ar" else random_extended(target)
    engine = FailFast(target, drafter, quantize="int8", quantize_drafter="int8")
    reader = engine.drafter if method == "ar" else engine.drafter.network
    assert all(isinstance(layer.weight[...], BlockMatrix) for layer in linears(engine.target) + linears(reader))
    drafts = {"spec_len": 4} if method == "ar" else {"spec_len": 4, "max_spec_len": 4}
    (result,) = lossless(engine, [PROMPT], method=method, max_new_tokens=24, ignore_eos=True, **drafts)
    assert method != "ar" or result.stats.accepted == result.stats.drafted > 10


@pytest.mark.parametrize("name", ["qwen2_target_160", "field/qwen3_a"])
def test_quantised_as_it_is_read(name):
    loaded, model = load_model(GOLDEN / name, quantize="int8"), load_model(GOLDEN / name)
    later = model.quantized()
    assert jax.tree.structure(loaded) == jax.tree.structure(later)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(later)))
    expected = np.asarray(model.logits([[1, 2, 3, 4]]))
    assert difference(loaded.logits([[1, 2, 3, 4]]), expected) < 0.08


def test_bad_input_is_named_before_anything_is_read():
    with pytest.raises(OptionError, match="--quantize int3: must be one of int8, int4"):
        FailFast("nowhere", quantize="int3")
    with pytest.raises(OptionError, match="--quantize-drafter fp8: must be one of int8"):
        FailFast("nowhere", "else", quantize_drafter="fp8")
    with pytest.raises(OptionError, match="--method lookup drafts without"):
        load_pair("nowhere", method="lookup", quantize_drafter="int8")
    with pytest.raises(OptionError, match="--activations int9: must be 'int8' or 'float32'"):
        FailFast("nowhere", activations="int9")
