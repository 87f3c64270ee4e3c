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
from failfast_jax.checkpoints.block_drafter_folder import BLOCK_LAYOUT
from failfast_jax.defaults import load_pair
from failfast_jax.errors import OptionError
from failfast_jax.kernels import cpu_blocks
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


@pytest.fixture(scope="module")
def folder_pairs():
    """A quantised target with its drafter's folder by form, None: unless it is said; a quantised drafter in memory."""
    if cpu_blocks.supports(inputs=64):
        pytest.skip(cpu_blocks.supports(inputs=64))
    target, folder = load_model(GOLDEN / "field/qwen3_a", quantize="int8"), GOLDEN / "field/dspark_qwen3_a"
    pairs = {form: FailFast.load(target, folder, quantize_drafter=form) for form in (None, "none", "int4")}
    options = {"quantize_drafter": "int8", "programs": pairs[None].runtime.programs}
    return pairs | {"memory": FailFast.load(target, BLOCK_LAYOUT.load(folder, target), **options)}


def test_a_folders_drafter_is_rounded_as_its_target_is(folder_pairs):
    forms = {form: pair.drafter for form, pair in folder_pairs.items()}
    for form, bits in ((None, 8), ("int4", 4), ("memory", 8)):
        model = forms[form]
        # 16 and 80 inputs fill no block of 32: the Markov and the confidence head have other forms.
        matrices = [layer.weight[...] for layer in linears(model.network) if layer.weight[...].shape[-1] % 32 == 0]
        assert len(matrices) == 9 and all(x.is_tiled for x in [*matrices, model.embed, model.head])
        assert {x.bits for x in [*matrices, model.embed, model.head]} == {bits}
        assert {x.activations for x in matrices} == {"int8"}
    assert not any(isinstance(layer.weight[...], BlockMatrix) for layer in linears(forms["none"].network))
    jax.tree.map(np.testing.assert_array_equal, forms[None], forms["memory"])


def test_rounds_are_those_of_the_same_rounding_in_memory(folder_pairs):
    options = {"method": "dspark", "max_new_tokens": 40, "ignore_eos": True}
    (read,) = lossless(folder_pairs[None], [PROMPT], **options)
    (rounded,) = folder_pairs["memory"].generate([PROMPT], **options)
    assert rounded.to_dict()["rounds"] == read.to_dict()["rounds"]
    assert read.stats.accepted > 8


def test_bad_input_is_named_before_anything_is_read():
    with pytest.raises(OptionError, match="--quantize int3: must be one of int8, int4"):
        FailFast("nowhere", quantize="int3")
    with pytest.raises(OptionError, match="--quantize-drafter fp8: must be one of int8, int4, none"):
        FailFast("nowhere", "else", quantize_drafter="fp8")
    with pytest.raises(OptionError, match="--method lookup drafts without"):
        load_pair("nowhere", method="lookup", quantize_drafter="int8")
    with pytest.raises(OptionError, match="--activations int9: must be 'int8' or 'float32'"):
        FailFast("nowhere", activations="int9")
