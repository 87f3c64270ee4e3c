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


def difference(found, expected) -> float:
    """Root mean square of the difference between logits, over their standard deviation."""
    return np.sqrt(np.mean((np.asarray(found) - expected) ** 2)) / np.std(expected)


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


def test_a_quantised_product_differs_by_the_rounding_alone():
    layer = Linear((2, 24), 64, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(48.0).reshape(2, 24)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 5, 64)), jnp.float32)
    small = quantization.with_rounded_matrices(layer)
    restored = np.asarray(small.weight[...], np.float64) * small.scale[...]
    expected = np.asarray(x, np.float64) @ restored.reshape(48, 64).T + np.arange(48.0)
    np.testing.assert_allclose(small(x), expected, rtol=1e-5, atol=1e-4)
    small.bias = None
    assert small(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert small(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("tied", [False, True])
def test_logits_stay_close_and_the_original_as_it_was(tied):
    model = random_model(tiny_config(tie_embeddings=tied, mlp_bias=True))
    expected = np.asarray(model.logits([PROMPT]))
    small = model.quantized()
    assert all(layer.weight[...].dtype == jnp.int8 for layer in linears(small))
    assert len(linears(small)) == 2 * 4 + 1
    assert 1e-4 < difference(small.logits([PROMPT]), expected) < 0.03
    assert small.quantized().head.weight is small.head.weight
    assert all(layer.scale is None for layer in linears(model))
    assert np.array_equal(model.logits([PROMPT]), expected)
    if tied:
        assert model.head is None and small.embed[...] is model.embed[...]
    # What others borrow of a head is its meaning, not its integers.
    assert np.abs(np.asarray(small.head_weight) - np.asarray(model.head_weight)).max() < 0.05


def test_half_the_bytes():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "head_dim": 64, "vocab_size": 64}
    model = random_model(tiny_config(**sizes), dtype="bfloat16")
    small = model.quantized()
    matrices = sum(layer.weight[...].nbytes for layer in linears(model))
    assert matrices > 0.9 * quantization.parameter_bytes(model)
    assert 0.5 < quantization.parameter_bytes(small) / quantization.parameter_bytes(model) < 0.56
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model).quantized()
    assert quantization.parameter_bytes(abstract) == quantization.parameter_bytes(small)
    assert jax.tree.structure(abstract) == jax.tree.structure(small)


@pytest.mark.parametrize("kind", ["ar", "extended"])
def test_lossless_against_the_quantised_target(kind):
    target = random_model(tiny_config())
    # Drafting with the target itself: everything is accepted.
    drafter = target if kind == "ar" else random_extended(target)
    engine = FailFast(target, drafter, quantize="int8", quantize_drafter="int8")
    reader = engine.drafter.network if kind == "extended" else engine.drafter
    assert all(layer.scale is not None for layer in linears(engine.target) + linears(reader))
    drafting = {"method": "ar"} if kind == "ar" else {"method": "failfast", "max_spec_len": 4}
    (found,) = lossless(engine, [PROMPT], spec_len=4, max_new_tokens=24, ignore_eos=True, **drafting)
    assert kind != "ar" or found.stats.accepted == found.stats.drafted > 10


@pytest.mark.parametrize("name", ["qwen2_target_160", "llama_tied"])
def test_quantised_as_it_is_read(name):
    loaded, model = load_model(GOLDEN / name, quantize="int8"), load_model(GOLDEN / name)
    later = model.quantized()
    assert jax.tree.structure(loaded) == jax.tree.structure(later)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(later)))
    expected = np.asarray(model.logits([[1, 2, 3, 4]]))
    assert difference(loaded.logits([[1, 2, 3, 4]]), expected) < 0.08


@pytest.mark.parametrize(
    "load, message",
    [
        (lambda: FailFast("nowhere", quantize="int4"), "--quantize int4: must be one of int8"),
        (lambda: FailFast("nowhere", "else", quantize_drafter="fp8"), "--quantize-drafter fp8: must be one of int8"),
        (lambda: FailFast("nowhere", quantize_drafter="int8"), "--quantize-drafter int8: there is no drafter"),
        (lambda: load_pair("nowhere", method="lookup", quantize_drafter="int8"), "--method lookup drafts without"),
        (lambda: load_model("nowhere", quantize="int8"), r'needs qwix.*pip install -e "\.\[quant\]"'),
    ],
)
def test_bad_input_is_named_before_anything_is_read(load, message, monkeypatch):
    if "qwix" in message:
        monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(OptionError, match=message):
        load()
