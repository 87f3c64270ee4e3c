"""Models in int8: what they compute, what they weigh, and that speculation stays lossless."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from flax import nnx
from tiny_engines import lossless
from tiny_models import random_extended, random_model, tiny_config

from failfast_jax import FailFast, load_model
from failfast_jax.defaults import load_pair
from failfast_jax.errors import OptionError
from failfast_jax.models import quantization
from failfast_jax.models.layers import Linear

PROMPT = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]


def linears(model) -> list[Linear]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]


def difference(actual, expected) -> float:
    """Root mean square of the difference between logits, over their standard deviation."""
    return np.sqrt(np.mean((np.asarray(actual) - expected) ** 2)) / np.std(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_is_rounded_to_the_nearest_level_of_its_output(dtype):
    rng = np.random.default_rng(0)
    # Outputs of very different size, one of them silent.
    weight = rng.standard_normal((3, 5, 64)) * 10.0 ** rng.integers(-4, 4, (3, 5, 1))
    weight[1, 2] = 0
    weight = jnp.asarray(weight, dtype)
    integers, scale = quantization.rounded(weight)
    assert (integers.dtype, integers.shape) == (jnp.int8, weight.shape)
    assert (scale.dtype, scale.shape) == (jnp.float32, (3, 5, 1))
    integers = np.asarray(integers, np.float64)
    error = np.abs(integers * scale - np.asarray(weight, np.float64))
    assert (error <= 0.5001 * np.asarray(scale)).all()
    peaks = np.abs(integers).max(-1)
    assert peaks[1, 2] == 0 and (np.delete(peaks.ravel(), 1 * 5 + 2) >= 127).all()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_stay_close_and_the_original_as_it_was(tied):
    model = random_model(tiny_config(tie_embeddings=tied, mlp_bias=True))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model).quantized()
    expected = np.asarray(model.logits([PROMPT]))
    small = model.quantized()
    assert all(layer.weight[...].dtype == jnp.int8 for layer in linears(small))
    assert len(linears(small)) == 2 * 4 + 1
    assert jax.tree.all(jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), abstract, small))
    assert 1e-4 < difference(small.logits([PROMPT]), expected) < 0.03
    assert small.quantized().head.weight is small.head.weight
    assert all(layer.scale is None for layer in linears(model))
    assert np.array_equal(model.logits([PROMPT]), expected)
    if tied:
        assert model.head is None and small.embed[...] is model.embed[...]
    # What others borrow of a head is its meaning, not its integers.
    assert np.abs(np.asarray(small.head_weight) - np.asarray(model.head_weight)).max() < 0.05


@pytest.mark.parametrize("method", ["ar", "failfast"])
def test_lossless_against_the_quantised_target(method):
    target = random_model(tiny_config())
    # Drafting with the target itself: everything is accepted.
    drafter = target if method == "ar" else random_extended(target)
    engine = FailFast(target, drafter, quantize="int8", quantize_drafter="int8")
    reader = engine.drafter if method == "ar" else engine.drafter.network
    assert all(layer.scale is not None for layer in linears(engine.target) + linears(reader))
    drafts = {"spec_len": 4} if method == "ar" else {"spec_len": 4, "max_spec_len": 4}
    (result,) = lossless(engine, [PROMPT], method=method, max_new_tokens=24, ignore_eos=True, **drafts)
    assert method != "ar" or result.stats.accepted == result.stats.drafted > 10


@pytest.mark.parametrize("name", ["qwen2_target_160", "llama_tied"])
def test_quantised_as_it_is_read(name):
    loaded, model = load_model(GOLDEN / name, quantize="int8"), load_model(GOLDEN / name)
    later = model.quantized()
    assert jax.tree.structure(loaded) == jax.tree.structure(later)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(later)))
    expected = np.asarray(model.logits([[1, 2, 3, 4]]))
    assert difference(loaded.logits([[1, 2, 3, 4]]), expected) < 0.08


def test_bad_input_is_named_before_anything_is_read(monkeypatch):
    with pytest.raises(OptionError, match="--quantize int4: must be one of int8"):
        FailFast("nowhere", quantize="int4")
    with pytest.raises(OptionError, match="--quantize-drafter fp8: must be one of int8"):
        FailFast("nowhere", "else", quantize_drafter="fp8")
    with pytest.raises(OptionError, match="--method lookup drafts without"):
        load_pair("nowhere", method="lookup", quantize_drafter="int8")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(OptionError, match=r'needs qwix.*pip install -e "\.\[quant\]"'):
        load_model("nowhere", quantize="int8")
