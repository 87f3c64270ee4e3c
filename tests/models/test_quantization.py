"""Models in blocks: what they compute, what they weigh, and that speculation stays lossless."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, gguf_tokenizer, write_gguf
from flax import nnx
from gguf import GGMLQuantizationType as Quant
from tiny_engines import lossless
from tiny_models import as_untrained_drafter, random_extended, random_model, tiny_config, widened

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.block_drafter_folder import BLOCK_LAYOUT
from failfast_jax.decoding import picking
from failfast_jax.errors import OptionError
from failfast_jax.kernels import blocks, cpu_blocks, cpu_kernels
from failfast_jax.kernels.attention_window import RowGroups, TreeMask
from failfast_jax.kernels.blocks import BlockMatrix, TiledMatrix, TiledStack, TransposedMatrix, as_array
from failfast_jax.kernels.row_operations import product
from failfast_jax.models import quantization, sharding, transformer
from failfast_jax.models.layers import Linear
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import progress

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
    assert all(isinstance(layer.weight[...], BlockMatrix | TiledStack) for layer in linears(small))
    assert small.is_stacked and isinstance(small.embed[...], BlockMatrix)
    assert len(linears(small)) == 4 + (not tied) and small.layers[0].mlp.down.weight[...].places == ((0, 0), (0, 1))
    assert 1e-4 < difference(small.logits([PROMPT]), expected) < error
    assert small.quantized().embed[...].codes is small.embed[...].codes
    assert np.array_equal(model.logits([PROMPT]), expected)


def stacked_and_not(head_dim: int) -> tuple[Decoder, Decoder]:
    """Layers of two forms, in one item and one by one."""
    model = random_model(tiny_config(hidden_size=64, intermediate_size=96, num_layers=3, head_dim=head_dim))
    model.layers[1] = quantization.quantized(model.layers[1], "int4")
    stacked = model.quantized()
    single = copy.copy(stacked)
    single.layers = nnx.List(quantization.quantized(layer, "int8") for layer in model.layers)
    assert stacked.is_stacked and stacked.layers[0].mlp.down.weight[...].places == ((0, 0), (1, 0), (0, 1))
    return stacked, single


def two_windows(model: Decoder, batch: int = 2, **extra) -> list:
    """Hidden states and features of a window after another one; keys and values of all layers."""
    cache = model.init_cache(batch, 128)
    _, cache, _ = model.window(jnp.arange(7 * batch).reshape(batch, 7), cache, jnp.zeros(batch, int), jnp.int32(7))
    tokens, start = jnp.array([[3, 4, 5]] * batch), jnp.full(batch, 7)
    hidden, cache, features = model.window(tokens, cache, start, jnp.int32(10), (2, -1, 0), **extra)
    return [hidden, features, jnp.concatenate(cache.k, axis=1), jnp.concatenate(cache.v, axis=1)]


@pytest.mark.parametrize("head_dim", [8, 32])  # rotated by XLA, and by the kernel
@pytest.mark.parametrize("pattern", ["text", "tree", "copies"])
def test_a_pass_over_stacked_layers_has_the_bits_of_one_that_names_them(pattern, head_dim):
    seen = [[7, 7 + row, 8 + row, 0, 0] for row in range(3)]
    extra = {
        "text": {},
        "tree": {"tree": TreeMask(jnp.array([[0, 1, 1]] * 2), jnp.tril(jnp.ones((2, 3, 3), bool)))},
        "copies": {"groups": RowGroups(jnp.array([[7, 8, 7]] * 2), jnp.array([seen] * 2))},
    }[pattern]
    stacked, single = stacked_and_not(head_dim)
    for by_stack, by_name in zip(two_windows(stacked, **extra), two_windows(single, **extra)):
        assert np.array_equal(by_stack, by_name) and np.isfinite(by_name).all()
    if pattern == "text":
        assert np.allclose(stacked.logits([PROMPT]), single.logits([PROMPT]), atol=1e-5)


@pytest.mark.parametrize("kernel", ["xla", "reference", pytest.param("simulated-tpu", marks=pytest.mark.long)])
def test_every_kernel_finds_its_layer_in_a_stacked_cache(kernel):
    forms = [model.spread(None, kernel=kernel) for model in stacked_and_not(128)]
    for by_stack, by_name in zip(*map(two_windows, forms)):
        assert np.allclose(by_stack, by_name, atol=1e-5)


def test_a_pass_over_stacked_layers_copies_no_cache():
    """Layers of two forms: a choice between layers would carry the caches, and copy them."""
    stacked, _ = stacked_and_not(32)
    cache = stacked.init_cache(1, 1024)
    arguments = stacked, jnp.zeros((1, 4), int), cache, jnp.zeros(1, int), jnp.int32(4)
    step = jax.jit(lambda model, *window: model.window(*window)[:2], donate_argnums=2)
    needed = step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert needed < cache.k[0].nbytes / 4


def test_models_in_bfloat16_are_not_stacked():
    """XLA for CPU writes a slice of a bfloat16 array as the whole array."""
    model = random_model(tiny_config(hidden_size=64, intermediate_size=96, num_layers=3), dtype="bfloat16")
    assert not model.quantized().is_stacked


@pytest.mark.parametrize("method", ["ar", "failfast"])
def test_lossless_against_the_quantised_target(method):
    target = random_model(tiny_config(hidden_size=64, intermediate_size=96))
    # Drafting with the target itself: everything is accepted.
    drafter = target if method == "ar" else random_extended(target)
    engine = FailFast(target, drafter, quantize="int8", quantize_drafter="int8")
    reader = engine.drafter if method == "ar" else engine.drafter.network
    kinds = BlockMatrix | TiledStack
    assert all(isinstance(layer.weight[...], kinds) for layer in linears(engine.target) + linears(reader))
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
    if cpu_blocks.refusal(64):
        pytest.skip(cpu_blocks.refusal(64))
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
        assert len(matrices) == 9 and all(isinstance(x, TiledMatrix) for x in [*matrices, model.embed, model.head])
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
        FailFast.load("nowhere", method="lookup", quantize_drafter="int8")
    with pytest.raises(OptionError, match="--activations int9: must be 'int8' or 'float32'"):
        FailFast("nowhere", activations="int9")
    with pytest.raises(OptionError, match="--activations int9: must be one of int8, float32"):
        load_model("nowhere", quantize="int8", activations="int9")


# What is computed in, and what it takes.

SIZES = {"hidden_size": 64, "intermediate_size": 96}
needs_kernel = pytest.mark.skipif(cpu_kernels.integer_lanes() is None, reason="XLA multiplies on this processor")


@pytest.fixture
def warnings(caplog):
    progress.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        yield lambda: [record.message for record in caplog.records if "XLA multiplies" in record.message]


@needs_kernel
def test_both_arithmetics_are_named_and_computed(warnings):
    engine = FailFast(random_model(tiny_config(**SIZES)), method="vanilla", quantize="int8")
    exact = FailFast.load(engine, activations="float32")
    answer = engine.generate([PROMPT], method="vanilla", max_new_tokens=2)[0]
    assert answer.arithmetic == answer.to_dict()["arithmetic"] == "8-bit blocks, int8 activations"
    assert exact.arithmetic == "8-bit blocks, float32 activations"
    assert exact.target.embed[...].codes is engine.target.embed[...].codes
    expected = np.asarray(widened(engine.target).logits([PROMPT]))
    assert difference(exact.target.logits([PROMPT]), expected) < 1e-5
    assert 1e-3 < difference(engine.target.logits([PROMPT]), expected) < 0.05
    assert warnings() == []


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (random_model(tiny_config()), "float32 weights, float32 activations"),
        (random_model(tiny_config(), dtype="bfloat16"), "bfloat16 weights, bfloat16 activations"),
        # The MLP's second matrix has 96 inputs, all others 40: these stay floats in 4 bits.
        (
            random_model(tiny_config(hidden_size=40, intermediate_size=96, head_dim=10)).quantized("int4"),
            "4-bit blocks, float32 weights, float32 and int8 activations",
        ),
    ],
)
def test_arithmetics_by_name(model, text):
    if cpu_kernels.integer_lanes() is None:
        text = text.replace(" and int8", "")
    assert quantization.arithmetic(model) == text


def test_without_the_kernel_xla_multiplies_in_float32_and_a_line_says_so(monkeypatch, warnings):
    monkeypatch.setattr(cpu_kernels, "integer_lanes", lambda: None)
    target = random_model(tiny_config(**SIZES, num_layers=1))
    engine = FailFast(target, quantize="int4", activations="float32")
    reason = cpu_kernels.NO_UNIT
    assert warnings() == [f"the target model: {reason}: XLA multiplies its quantised matrices, slowly, in float32"]
    assert engine.arithmetic == "4-bit blocks, float32 activations"
    expected = np.asarray(widened(engine.target).logits([PROMPT]))
    assert difference(engine.target.logits([PROMPT]), expected) < 1e-5
    with pytest.raises(OptionError, match=f"--activations int8: {reason}"):
        FailFast("nowhere", activations="int8")
    with pytest.raises(OptionError, match="--activations float32: target: .* XLA multiplies in bfloat16"):
        FailFast(random_model(tiny_config(), dtype="bfloat16"), quantize="int8", activations="float32")


def test_a_file_that_is_quantised_already_stays_so_and_a_line_says_it(tmp_path, caplog):
    progress.warn_once.cache_clear()
    path = write_gguf(tmp_path / "model.gguf", "qwen2_untied", quantise=lambda *_: Quant.F32, extra=gguf_tokenizer)
    FailFast(path, quantize="int4")
    assert "is quantised" not in caplog.text
    half = lambda _, value: Quant.Q8_0 if value.ndim == 2 and value.shape[1] % 32 == 0 else Quant.F32  # noqa: E731
    path = write_gguf(tmp_path / "quantised.gguf", "qwen2_untied", quantise=half, extra=gguf_tokenizer)
    engine = FailFast(path, quantize="int4")
    assert f"--quantize int4: {path} is quantised; its blocks stay as stored" in caplog.text
    assert engine.target.layer(0).mlp.gate_up.weight[...].forms[0].bits == 8


@needs_kernel
def test_activations_are_served_or_refused():
    target, drafter = random_model(tiny_config(**SIZES)), random_model(tiny_config(**SIZES), seed=1)
    for options in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(OptionError, match="float32: no matrix of the target or the drafter is quantised; leave"):
            FailFast(target, drafter, activations="float32", **options)
    with pytest.raises(OptionError, match="--activations int8: no matrix of the target is quantised"):
        load_model(GOLDEN / "qwen2_target_160", activations="int8")
    engine = FailFast(target, drafter, quantize_drafter="int4", activations="float32")
    names = [quantization.arithmetic(model) for model in (engine.target, engine.drafter)]
    assert names == ["float32 weights, float32 activations", "4-bit blocks, float32 activations"]
    odd = random_model(tiny_config(hidden_size=40, head_dim=10))
    with pytest.raises(OptionError, match="int8: target: .*40 inputs, not a multiple of 32; XLA multiplies in float32"):
        FailFast(odd, quantize="int8", activations="int8")
    spread = {"tensor_parallel": 2, "data_parallel": 64}
    flags = "--tensor-parallel 2 and --data-parallel 64$"
    with pytest.raises(OptionError, match=f"--activations int8: for one device; leave it out, or {flags}"):
        FailFast("nowhere", quantize="int8", activations="int8", **spread)


def test_int8_is_refused_on_other_devices(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for activations in ("int8", "float32"):
        with pytest.raises(OptionError, match=f"--activations {activations}: for CPUs only"):
            quantization.check_activations(activations)
    quantization.check_activations(None)


def small_model() -> transformer.Decoder:
    config = tiny_config(hidden_size=256, intermediate_size=128, num_layers=1, head_dim=32, qkv_bias=False)
    return random_model(dataclasses.replace(config, tie_embeddings=True))


def test_smaller_layouts_are_those_of_accelerators():
    model = small_model()
    # Outputs and inputs: qkv, o, gate and up, down, embedding; beside them three norms of 256.
    matrices = [(256, 256), (256, 128), (256, 256), (256, 128), (40, 256)]
    floats = 4 * sum(outputs * inputs for outputs, inputs in matrices)
    int8 = sum(outputs * inputs + 4 * outputs for outputs, inputs in matrices)
    int4 = sum(outputs * inputs // 2 + 4 * outputs * inputs // 128 for outputs, inputs in matrices)
    norms = 3 * 4 * 256
    assert quantization.parameter_bytes(model) == floats + norms and quantization.parameter_bytes(model, model) == 0
    elsewhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    layouts = quantization.smaller_layouts({"--quantize": elsewhere, "--quantize-drafter": None}, floats + norms)
    assert layouts == {"--quantize int8": int8 + norms, "--quantize int4": int4 + norms}


def test_smaller_layouts_are_those_of_this_machine():
    model = small_model()
    quantized = {f"--quantize {scheme}": model.quantized(scheme) for scheme in ("int8", "int4")}
    sizes = {flag: quantization.parameter_bytes(other) for flag, other in quantized.items()}
    assert quantization.smaller_layouts({"--quantize": model}, quantization.parameter_bytes(model)) == sizes
    assert quantization.smaller_layouts({"--quantize": quantized["--quantize int4"]}, 10**6) == {}


# Models in blocks on a mesh, here of one device.


@pytest.mark.parametrize(
    ("bits", "group", "head_dim"), [(8, 192, 32), (8, 32, 32), (4, 64, 32), (4, 32, 16), (4, 32, 128)]
)
def test_copies_of_heads_in_blocks_have_the_same_numbers(bits, group, head_dim):
    size, in_words = 6 * max(32, head_dim), head_dim == 128
    model = random_model(tiny_config(num_heads=size // head_dim, num_kv_heads=2, head_dim=head_dim, hidden_size=size))
    attention, exact = copy.deepcopy(model.layers[0].attention), model.layers[0].attention
    for name in ("qkv", "o"):
        matrix = blocks.quantize(getattr(exact, name).weight[...], bits, group)
        getattr(exact, name).weight = nnx.Param(as_array(matrix))
        getattr(attention, name).weight = nnx.Param(blocks.transpose(matrix, in_words=in_words))
    mesh = sharding.make_mesh()
    small, exact = (each.with_copies(2, mesh, sharding.TENSOR) for each in (attention, exact))
    for name in ("qkv", "o"):
        matrix, expected = (getattr(each, name).weight[...] for each in (small, exact))
        assert isinstance(matrix, BlockMatrix) and matrix.in_words == in_words
        np.testing.assert_array_equal(as_array(matrix), expected.reshape(matrix.shape))


def test_a_matrix_laid_out_for_other_devices_is_not_spread():
    model, mesh = random_model(tiny_config(**SIZES)), sharding.mesh_of(jax.devices()[:1] * 2)
    with pytest.raises(OptionError, match="the quantised model in memory was read for other devices: give its path"):
        model.quantized().spread(mesh)


def test_masks_are_embedded_where_the_vocabulary_is_spread():
    drafter = as_untrained_drafter(random_model(tiny_config(**SIZES)).quantized(), 8)
    tokens = np.array([[3, drafter.config.vocab_size - 1]])
    expected = drafter.embedded(tokens)
    drafter.execution = sharding.Execution(mesh=sharding.make_mesh(), vocab=sharding.TENSOR)
    np.testing.assert_array_equal(drafter.embedded(tokens), expected)
    assert np.abs(expected[0, 1]).max() > 0


def test_rows_of_a_transposed_matrix_are_transposed(monkeypatch):
    gathered = []
    monkeypatch.setattr(quantization, "whole", lambda part: gathered.append(part.shape) or part)
    matrix = blocks.quantize(jax.numpy.asarray(np.random.default_rng(0).standard_normal((40, 64))), 8, 64)
    chosen = quantization.take_rows(blocks.transpose(matrix), np.arange(0, 40, 2))
    assert isinstance(chosen, TransposedMatrix) and gathered == [(1, 64, 40), (1, 40)]
    x = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(product(x, chosen), x @ as_array(matrix)[::2].T, rtol=1e-5)


def test_argmax_of_logits_on_a_mesh_is_xlas():
    execution = sharding.Execution(mesh=sharding.make_mesh(), vocab=sharding.TENSOR)
    text = jax.jit(functools.partial(picking.argmax, execution=execution)).lower(jax.numpy.ones((1, 2, 64))).as_text()
    assert "failfast" not in text
