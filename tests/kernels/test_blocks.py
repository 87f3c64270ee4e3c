"""Matrices in blocks: against numpy's integers and float64, for every form, width of rows and kind of processor."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from failfast_jax.checkpoints import gguf_blocks
from failfast_jax.kernels import blocks, cpu_blocks, cpu_kernels
from failfast_jax.kernels.blocks import StoredMatrix
from failfast_jax.kernels.row_operations import product

INPUTS, OUTPUTS = 768, 72
WIDTHS = (1, 2, 3, 5, 8, 17, 64, 128)
FORMS = [
    pytest.param(*form, id="-".join(map(str, form)))
    # bits, inputs of a scale, whether there is a minimum, inputs of an outer scale
    for form in [
        (4, 32, False, 0),  # Q4_0
        (4, 32, True, 0),  # Q4_1
        (4, 32, True, 256),  # Q4_K
        (4, 64, False, 0),
        (4, 128, True, 0),
        (4, 128, True, 128),  # AWQ
        (8, 16, False, 256),  # Q6_K
        (8, 32, False, 0),  # Q8_0
        (8, 32, True, 0),  # Q5_1
        (8, 32, True, 256),  # Q5_K
        (8, 768, False, 0),  # compressed-tensors, channel-wise
    ]
]


def random_blocks(bits: int, group: int, has_minimum: bool, outer: int) -> StoredMatrix:
    random = np.random.default_rng(0)

    def scales(size: int, integers: bool = False) -> np.ndarray:
        shape = (OUTPUTS, INPUTS // size)
        return (
            random.integers(-63, 64, shape, np.int8) if integers else random.standard_normal(shape).astype(np.float16)
        )

    inner, above = [scales(group, bool(outer)) for _ in range(2)], [scales(outer or group) for _ in range(2)]
    codes = random.integers(-128, 128, (OUTPUTS, INPUTS * bits // 8), np.int8)
    return StoredMatrix(
        codes.view(np.uint8) if bits == 4 else codes,
        inner[0],
        inner[1] if has_minimum else None,
        above[0] if outer else None,
        above[1] if outer and has_minimum else None,
        bits=bits,
    )


def numbers(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, INPUTS)).astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a * b + c` of float32, rounded once: the product is exact in float64, and so nearly always is the sum."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def integer_product(x: np.ndarray, matrix: StoredMatrix) -> np.ndarray:
    """The product of rows rounded to int8, by numpy: integers within a group, float32 over groups, in order."""
    grouped = x.reshape(len(x), -1, 32)
    peak = np.abs(grouped).max(axis=-1)
    rounded = np.rint(grouped * (np.float32(127) / peak)[..., None]).astype(np.int32).reshape(x.shape)
    row_scale = peak / np.float32(127)
    codes = np.asarray(matrix.codes)
    if matrix.bits == 4:
        pairs = codes.reshape(OUTPUTS, -1, 16)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(OUTPUTS, INPUTS).astype(np.int32)
        codes = codes - (8 if matrix.minimum is None else 0)

    def levels(inner: np.ndarray, outer: np.ndarray | None) -> np.ndarray:
        inner = inner.astype(np.float32)
        return inner if outer is None else inner * np.repeat(outer, inner.shape[1] // outer.shape[1], 1)

    scale, total = levels(matrix.scale, matrix.outer_scale), np.zeros((len(x), OUTPUTS), np.float32)
    minimum = None if matrix.minimum is None else levels(matrix.minimum, matrix.outer_minimum)
    size = min(matrix.group, 32)
    for at in range(0, INPUTS, size):
        here, of_rows = rounded[:, at : at + size], row_scale[:, at // 32, None]
        dot = (here @ codes[:, at : at + size].T.astype(np.int32)).astype(np.float32)
        total = fma(scale[:, at // matrix.group] * of_rows, dot, total)
        if minimum is not None:
            total = fma(
                minimum[:, at // matrix.group], of_rows * here.sum(axis=1, keepdims=True).astype(np.float32), total
            )
    return total


@pytest.fixture(params=[4, 8, 16])
def integer_lanes(request, monkeypatch):
    if request.param > (cpu_kernels.integer_lanes() or 0):
        pytest.skip("this processor has no such vectors")
    monkeypatch.setattr(cpu_kernels, "integer_lanes", lambda: request.param)


@pytest.mark.parametrize(("bits", "group", "has_minimum", "outer"), FORMS)
def test_products_of_rounded_rows_have_the_bits_of_integer_sums(integer_lanes, bits, group, has_minimum, outer):
    matrix = random_blocks(bits, group, has_minimum, outer)
    tiles = blocks.tile(matrix)
    for rows in WIDTHS:
        x = numbers(rows)
        np.testing.assert_array_equal(cpu_blocks.product(x, tiles), integer_product(x, matrix), f"{rows} rows")


@pytest.mark.parametrize(("bits", "group", "has_minimum", "outer"), FORMS)
def test_products_of_float32_rows(integer_lanes, bits, group, has_minimum, outer):
    matrix = random_blocks(bits, group, has_minimum, outer)
    weight = matrix.dequantized().astype(np.float64)
    tiles = dataclasses.replace(blocks.tile(matrix), activations="float32")
    x = numbers(max(WIDTHS))
    whole = np.asarray(cpu_blocks.product(x, tiles))
    np.testing.assert_array_less(abs(whole - x @ weight.T), 1e-6 * (abs(x) @ abs(weight).T) + 1e-9)
    for rows in WIDTHS:
        np.testing.assert_array_equal(cpu_blocks.product(x[:rows], tiles), whole[:rows], f"{rows} rows")


@pytest.mark.parametrize(("bits", "group", "has_minimum", "outer"), FORMS)
def test_tiles_hold_the_same_numbers(bits, group, has_minimum, outer):
    matrix = random_blocks(bits, group, has_minimum, outer)
    weight, tiles = matrix.dequantized(), blocks.tile(matrix)
    assert tiles.shape == matrix.shape == weight.shape
    assert tiles.group == matrix.group == group
    np.testing.assert_array_equal(tiles.dequantized(), weight)
    ids = np.array([[0, 17], [71, 3]])
    np.testing.assert_array_equal(tiles[ids], weight[ids])
    np.testing.assert_array_equal(tiles.outputs_from(16).dequantized(), weight[16:])


@pytest.mark.parametrize(("bits", "group", "has_minimum", "outer"), FORMS)
def test_transposed_blocks_hold_the_same_numbers_and_make_the_same_products(bits, group, has_minimum, outer):
    matrix = random_blocks(bits, group, has_minimum, outer)
    weight, turned = matrix.dequantized(), jax.jit(blocks.transpose)(matrix)
    assert turned.shape == matrix.shape and turned.group == group
    assert turned.codes.dtype == ("int8" if bits == 8 else "uint4" if has_minimum else "int4")
    np.testing.assert_array_equal(turned.dequantized(), weight)
    ids = jnp.array([[0, 17], [71, 3]])
    np.testing.assert_array_equal(turned[ids], weight[ids])
    in_turn = turned.with_arrays(lambda part: blocks.in_turn(part, ids.reshape(-1)))
    np.testing.assert_array_equal(in_turn.dequantized(), weight[ids.reshape(-1)])
    for rows in (1, 8, 17):
        x = numbers(rows)
        bound = 1e-6 * (abs(x) @ abs(weight).T) + 1e-9
        np.testing.assert_array_less(abs(product(x, turned) - x @ weight.T.astype(np.float64)), bound)


def test_outer_scales_become_so_fine_that_a_device_has_its_own():
    matrix = random_blocks(4, 32, True, 256)
    parted = blocks.with_scales_for(matrix, 384)  # one and a half outer scales
    np.testing.assert_array_equal(parted.dequantized(), matrix.dequantized())
    assert parted.outer_scale.shape == (OUTPUTS, INPUTS // 128)
    with pytest.raises(ValueError, match="groups of 32 inputs cannot be divided into parts of 48"):
        blocks.with_scales_for(matrix, 48)
    parted = blocks.with_scales_for(whole := random_blocks(8, 768, False, 0), 384)
    np.testing.assert_array_equal(parted.scale, np.repeat(whole.scale, 2, axis=1))
    with pytest.raises(ValueError, match="groups of 32 inputs cannot be divided into parts of 48"):
        blocks.with_scales_for(random_blocks(4, 768, False, 0), 48)


@pytest.mark.parametrize("quant", gguf_blocks.LAYOUTS, ids=lambda quant: quant.name)
def test_blocks_of_gguf_are_the_numbers_of_its_package(quant):
    size, size_bytes = gguf.GGML_QUANT_SIZES[quant]
    stored = np.random.default_rng(0).integers(0, 256, (OUTPUTS, INPUTS // size, size_bytes), np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(stored.reshape(OUTPUTS, -1), quant)
        np.testing.assert_array_equal(gguf_blocks.read_blocks(stored, quant).dequantized(), expected)


def test_matrices_of_different_forms_become_one():
    matrices = [random_blocks(*form.values) for form in FORMS]
    alike = blocks.unify_forms(matrices)
    assert len({jax.tree.structure(matrix) for matrix in alike}) == 1
    for before, after in zip(matrices, alike):
        np.testing.assert_array_equal(after.dequantized(), before.dequantized())
    assert blocks.unify_forms(matrices[:1] * 2)[0] is matrices[0]
    with pytest.raises(ValueError, match="8 groups of inputs cannot be divided into 12"):
        blocks.unify_forms([random_blocks(8, group, False, 0) for group in (64, 96)])


@pytest.mark.parametrize(("bits", "error"), [(8, 1 / 250), (4, 1 / 28)])
def test_rounding_moves_a_number_by_half_a_step_at_most(bits, error):
    weight = jnp.asarray(numbers(48)).at[3].set(0)
    grouped = np.asarray(weight).reshape(48, -1, 32)
    span = 2 * abs(grouped).max(-1) if bits == 8 else grouped.max(-1) - grouped.min(-1)
    for array in (weight, np.asarray(weight)):
        matrix = blocks.quantize(array, bits)
        assert isinstance(matrix.codes, type(array))
        moved = abs(matrix.dequantized() - weight).reshape(grouped.shape).max(-1)
        assert np.all(moved <= error * span)
    with pytest.raises(ValueError, match="40 inputs"):
        blocks.quantize(jnp.ones((4, 40)), bits)


@pytest.mark.parametrize("change", [np.float32, np.int8, lambda scale: np.repeat(scale, 4, axis=1)])
def test_scales_that_the_kernel_cannot_read_are_refused(change):
    matrix = random_blocks(8, 32, False, 0)
    tiles = blocks.tile(dataclasses.replace(matrix, scale=change(matrix.scale)))
    with pytest.raises(ValueError, match=r"product by blocks \[72, 768\]: scales .*wants float16"):
        cpu_blocks.product(numbers(1), tiles)


def test_rows_that_are_not_finite_give_none_that_are():
    tiles = blocks.tile(random_blocks(4, 32, True, 0))
    x = numbers(3)
    x[0, 5], x[2, 700] = np.nan, np.inf
    finite = np.isfinite(cpu_blocks.product(x, tiles)).all(axis=1)
    assert finite.tolist() == [False, True, False]


def test_gradients_pass_through_a_matrix_in_blocks():
    matrix = random_blocks(4, 32, True, 0)
    x, weight = jnp.asarray(numbers(2)), matrix.dequantized()
    tiles = jax.tree.map(jnp.asarray, blocks.tile(matrix))
    gradient = jax.grad(lambda x: product(x, tiles).sum())(x)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(weight.sum(0), x.shape), rtol=1e-4, atol=1e-4)
