"""On CPU, matrices that are stored in 16 bits stay so under float32: half the memory, and the same arithmetic."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, cast, logits
from safetensors.numpy import load_file, save_file

from convert.conversion import convert
from failfast_jax import FailFast, load_model
from failfast_jax.kernels import cpu_kernels
from failfast_jax.models.quantization import parameter_bytes

pytestmark = pytest.mark.skipif(cpu_kernels.vector_lanes() is None, reason=cpu_kernels.NO_UNIT)
FIELD = GOLDEN / "field"


def stored(tmp_path: Path, source: Path, dtype: str) -> tuple[Path, Path]:
    """A checkpoint cast to a narrow dtype, and a float32 copy of the same numbers."""
    tensors = load_file(source / "model.safetensors")
    narrow = cast({name: x for name, x in tensors.items() if x.dtype == np.float32}, dtype)
    folders = []
    for label, values in ((dtype, narrow), ("float32", cast(narrow, "float32"))):
        folder = Path(shutil.copytree(source, tmp_path / label / source.name))
        save_file(tensors | values, folder / "model.safetensors")
        folders.append(folder)
    return tuple(folders)


def dtypes(model) -> set[tuple[int, str]]:
    """Dtypes of parameters, each with 1 for vectors and 2 for the others."""
    return {(min(x.ndim, 2), x.dtype.name) for x in jax.tree.leaves(model)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2_target_160", "llama_tied"])
def test_matrices_stay_and_bits_are_the_same(tmp_path, name, dtype):
    narrow, wide = map(load_model, stored(tmp_path, GOLDEN / name, dtype))
    assert narrow.dtype == jnp.float32 and narrow.embed[...].dtype == dtype
    assert (1, "float32") in dtypes(narrow) and (1, dtype) not in dtypes(narrow)
    assert parameter_bytes(narrow) < 0.55 * parameter_bytes(wide)
    few, many = np.arange(24)[None] * 5 % 140, np.arange(300)[None] % 140
    np.testing.assert_array_equal(logits(narrow, few), logits(wide, few))
    np.testing.assert_allclose(logits(narrow, many), logits(wide, many), atol=2e-4)  # of float32 XLA sums many rows
    as_asked = load_model(tmp_path / dtype / name, dtype=dtype)
    assert {kind for _, kind in dtypes(as_asked)} == {dtype} and {kind for _, kind in dtypes(wide)} == {"float32"}


def test_rounds_are_the_same(tmp_path):
    """A DSpark drafter: its draft, its confidence, and what its target makes of them."""
    targets = stored(tmp_path, FIELD / "qwen3_a", "bfloat16")
    drafters = stored(tmp_path, FIELD / "dspark_gated_qwen3_a", "bfloat16")
    options = {"method": "dspark", "max_new_tokens": 40, "ignore_eos": True, "exact": True}
    results = [FailFast(*pair).generate([[7, 3, 90, 11]], **options)[0] for pair in zip(targets, drafters)]
    assert results[0].output_ids == results[1].output_ids and len(results[0].rounds) > 3
    for narrow, wide in zip(*(result.rounds for result in results)):
        assert (narrow.drafted, narrow.accepted) == (wide.drafted, wide.accepted)
        np.testing.assert_array_equal(narrow.confidence, wide.confidence)


def test_an_eagle_drafter_answers_without_loss(tmp_path):
    narrow, wide = stored(tmp_path, FIELD / "qwen3_a", "bfloat16")
    engine = FailFast(narrow, stored(tmp_path, FIELD / "eagle3_qwen3_a", "bfloat16")[0])
    assert (2, "bfloat16") in dtypes(engine.drafter)
    options = {"max_new_tokens": 32, "ignore_eos": True}
    [expected] = FailFast(wide).generate([[5, 3, 90, 11]], method="vanilla", **options)
    [answer] = engine.generate([[5, 3, 90, 11]], method="eagle3", **options)
    assert answer.output_ids == expected.output_ids


def test_converted_folders_and_integers(tmp_path):
    narrow, wide = stored(tmp_path, GOLDEN / "qwen2_untied", "bfloat16")
    out = convert(narrow, tmp_path / "out")
    assert load_model(out).embed[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(logits(out), logits(wide))
    pytest.importorskip("qwix")
    np.testing.assert_array_equal(logits(narrow, quantize="int8"), logits(wide, quantize="int8"))


def test_no_pass_makes_a_wide_copy_of_the_matrices(tmp_path):
    def temporaries(folder: Path) -> int:
        model = load_model(folder)
        cache, zero = model.init_cache(1, 512), jnp.zeros((1,), jnp.int32)
        window = jax.jit(lambda model, ids: model.window(ids, cache, zero, jnp.int32(256))[0][:, -1])
        return window.lower(model, jnp.zeros((1, 256), jnp.int32)).compile().memory_analysis().temp_size_in_bytes

    narrow, wide = stored(tmp_path, GOLDEN / "qwen2_untied", "bfloat16")
    assert temporaries(narrow) <= temporaries(wide)
