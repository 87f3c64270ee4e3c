"""The CPU's products and norms: against float64, and bit for bit against themselves, for every width of vectors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest

from failfast_jax.kernels import compile_cpu_kernels, cpu_attention, cpu_kernels, cpu_rows
from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.row_operations import first_largest, product, xla_product
from failfast_jax.models.layers import RMSNorm, unit_rms


def weights(seed: int, outputs: int, inputs: int, dtype: str) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal((outputs, inputs))
    return jnp.asarray(numbers, jnp.float32).astype(dtype)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
def test_products_of_any_size(lanes, dtype):
    sizes = [(1, 48, 50), (2, 37, 9), (4, 1001, 7), (7, 33, 3), (13, 5, 7), (40, 96, 300)]
    x = [numbers(rows, rows, inputs) for rows, inputs, _ in sizes]
    w = [weights(outputs, outputs, inputs, dtype) for _, inputs, outputs in sizes]
    products = jax.jit(lambda x, w: [*map(cpu_rows.product, x, w)])(x, w)
    for rows, weight, output in zip(x, w, products):
        weight = np.asarray(weight).astype(np.float64)
        scale = np.abs(rows).astype(np.float64) @ np.abs(weight).T
        np.testing.assert_array_less(np.abs(output - rows.astype(np.float64) @ weight.T), 1e-6 * scale + 1e-9)


@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(lanes, dtype):
    parts = slice(1), slice(2), slice(3), slice(4), slice(5), slice(31, 66), slice(70)

    @jax.jit
    def products(x, w):
        return [cpu_rows.product(x[part], w) for part in parts]

    for inputs in (24, 256, 2053):
        *some, whole = products(numbers(1, 70, inputs), weights(2, 13, inputs, dtype))
        for part, output in zip(parts, some):
            np.testing.assert_array_equal(output, np.asarray(whole)[part])


def test_many_calls_at_once_share_the_threads():
    """Helpers that come late, when the work is done and other calls are under way."""
    x = [numbers(seed, 3, 96) for seed in range(4)]
    w = [weights(seed, 1200, 96, "float32") for seed in range(40)]
    together = jax.jit(lambda x, w: [[cpu_rows.product(rows, weight) for rows in x] for weight in w])
    expected = [[np.asarray(xla_product(rows, weight)) for rows in x] for weight in w]
    for _ in range(25):
        for got, one in zip(jax.tree.leaves(together(x, w)), jax.tree.leaves(expected)):
            np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-4)


def test_derivatives_are_those_of_a_product():
    x, w, g = numbers(1, 3, 20), weights(2, 30, 20, "float32"), numbers(3, 3, 30)
    ours, xla = (jax.jit(jax.grad(lambda x, w, by=by: (by(x, w) * g).sum(), (0, 1))) for by in (product, xla_product))
    for got, expected in zip(ours(x, w), xla(x, w)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    change = jax.jvp(product, (x, w), (x, w))[1]
    np.testing.assert_allclose(change, 2 * xla_product(x, w), rtol=1e-5, atol=1e-5)


def test_no_rows_have_no_products_and_types_are_those_of_rows():
    w = weights(2, 30, 20, "bfloat16")
    assert product(jnp.ones((0, 4, 20)), w, jnp.float32).shape == (0, 4, 30)
    assert jax.jit(product)(jnp.ones((3, 20), jnp.bfloat16), w).dtype == jnp.bfloat16


def test_what_would_be_read_beside_an_array_is_refused():
    rows, narrow = jnp.ones((2, 64)), jnp.ones((2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"float32\[2, 64\]: wants float32 rows .* O >= 3"):
        cpu_rows.product(rows, jnp.ones((2, 64)))
    with pytest.raises(ValueError, match="product of bfloat16.*wants float32 rows"):
        cpu_rows.product(narrow, jnp.ones((48, 64)))
    with pytest.raises(ValueError, match="norm of bfloat16.*wants float32 rows"):
        cpu_rows.rms_norm(narrow, jnp.ones(64), 1e-5)
    with pytest.raises(ValueError, match="a float32 weight"):
        cpu_rows.rms_norm(rows, narrow[0], 1e-5)
    window, keys = Window(None, None, jnp.asarray([5]), jnp.int32(7)), jnp.ones((1, 1, 256, 16))
    with pytest.raises(ValueError, match="keys and values differ in shape or dtype"):
        cpu_attention.attend(jnp.ones((1, 2, 2, 16)), (keys, keys.astype(jnp.bfloat16)), window)


@pytest.mark.parametrize("width, platform, calls", [(1, "cpu", 1), (128, "cpu", 1), (129, "cpu", 0), (8, "tpu", 0)])
def test_many_rows_go_to_xla_and_so_does_what_is_compiled_here_for_a_tpu(width, platform, calls):
    x, w = jax.ShapeDtypeStruct((width, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    lowered = jax.jit(product).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    assert lowered.count("failfast_product") == calls and ("dot_general" in lowered) == (not calls)


@pytest.mark.parametrize("size", [1, 15, 48, 577])
def test_norms_of_any_size(lanes, size):
    x, weight = numbers(1, 70, size), numbers(2, size)
    exact = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(cpu_rows.rms_norm(x, weight, 1e-5), exact, rtol=2e-6)
    np.testing.assert_array_equal(
        cpu_rows.rms_norm(x[66:], weight, 1e-5), np.asarray(cpu_rows.rms_norm(x, weight, 1e-5))[66:]
    )


@pytest.mark.parametrize("size", [16, 31, 64, 1001])
def test_the_first_of_the_largest(lanes, size):
    x = np.round(numbers(size, 9, size))  # few numbers: ties
    x[1], x[2], x[3, size // 2], x[4, -1] = -np.inf, 0, np.inf, np.nan
    x[5, 0], x[6, ::2], x[6, 1::2] = np.nan, -0.0, 0.0
    expected = np.where(np.isnan(x).any(axis=1), size, np.argmax(x, axis=1))
    lowered = jax.jit(first_largest).lower(x)
    assert "failfast_argmax" in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(x), expected)
    assert first_largest(x[None, :2]).shape == (1, 2)


def test_rows_are_as_xla_has_them_and_so_are_their_derivatives():
    x, norm = numbers(1, 2, 3, 96), RMSNorm(96, 1e-5, jnp.float32)

    def plain(x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    for ours in (norm, lambda x: unit_rms(x, 1e-5)):
        assert "failfast_" in jax.jit(ours).lower(x).as_text(), "the kernel is not called"
        np.testing.assert_allclose(ours(x), plain(x), rtol=1e-5)
        got, expected = (jax.grad(lambda x, of=of: (of(x) ** 3).sum())(x) for of in (ours, plain))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_what_is_shipped_is_what_the_c_file_says():
    pytest.importorskip("ziglang")
    for width in compile_cpu_kernels.LANES:
        shipped = Path(cpu_kernels.__file__).with_name(f"cpu_kernels_{width}.ll").read_text()
        assert shipped == compile_cpu_kernels.compiled(width), "python -m failfast_jax.kernels.compile_cpu_kernels"


@pytest.mark.parametrize("triple, width", [("aarch64-linux-gnu", 4), ("arm64-apple-macosx", 4), ("x86_64-windows", 8)])
def test_kernels_compile_for_other_machines(triple, width):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(features="" if width == 4 else "+avx2,+fma,+f16c")
    text = Path(cpu_kernels.__file__).with_name(f"cpu_kernels_{width}.ll").read_text()
    module = llvm.parse_assembly(text.replace("external constant i64", "internal constant i64 64"))
    module.triple, module.data_layout = triple, str(machine.target_data)
    assert machine.emit_object(module)


def test_a_second_process_does_not_compile(tmp_path):
    program = (
        "import jax, numpy as np; from failfast_jax.kernels import cpu_kernels, cpu_rows\n"
        "optimise = cpu_kernels.llvm.create_pass_builder\n"
        "cpu_kernels.llvm.create_pass_builder = lambda *a: (print('compiled'), optimise(*a))[1]\n"
        f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path)!r})\n"
        "print(cpu_rows.rms_norm(np.full((2, 40), 3, np.float32), np.ones(40, np.float32), 0.0)[1, 39])"
    )
    texts = [subprocess.check_output([sys.executable, "-c", program], text=True).split() for _ in range(2)]
    assert texts == [["compiled", "1.0"], ["1.0"]]
