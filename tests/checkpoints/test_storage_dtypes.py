"""On CPU, matrices that are stored in 16 bits stay so under float32: half the memory, and the same arithmetic."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import cast, hf_folder, logits, tensors_of

from failfast_jax import FailFast, load_model
from failfast_jax.kernels import cpu_kernels
from failfast_jax.models.quantization import parameter_bytes

pytestmark = [
    pytest.mark.skipif(cpu_kernels.vector_lanes() is None, reason=cpu_kernels.NO_UNIT),
    pytest.mark.usefixtures("few_widths"),
]


def stored(tmp_path: Path, name: str, dtype: str) -> list[Path]:
    """A golden checkpoint cast to a narrow dtype, and a float32 copy of the same numbers."""
    tensors = tensors_of(name)
    narrow = cast({key: value for key, value in tensors.items() if value.dtype == np.float32}, dtype)
    copies = {dtype: narrow, "float32": cast(narrow, "float32")}
    return [hf_folder(tmp_path / label / name, name, tensors | values) for label, values in copies.items()]


def dtypes(model) -> set[tuple[int, str]]:
    """Dtypes of parameters, each with 1 for vectors and 2 for the others."""
    return {(min(x.ndim, 2), x.dtype.name) for x in jax.tree.leaves(model)}


@pytest.mark.parametrize("name, dtype", [("qwen2_target_160", "bfloat16"), ("llama_tied", "float16")])
def test_matrices_stay_and_bits_are_the_same(tmp_path, name, dtype):
    narrow, wide = map(load_model, stored(tmp_path, name, dtype))
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
    targets = stored(tmp_path, "field/qwen3_a", "bfloat16")
    drafters = stored(tmp_path, "field/dspark_gated_qwen3_a", "bfloat16")
    options = {"method": "dspark", "max_new_tokens": 24, "ignore_eos": True, "exact": True}
    results = [FailFast(*pair).generate([[7, 3, 90, 11]], **options)[0] for pair in zip(targets, drafters)]
    assert results[0].output_ids == results[1].output_ids and len(results[0].rounds) > 3
    for narrow, wide in zip(*(result.rounds for result in results)):
        assert (narrow.drafted, narrow.accepted) == (wide.drafted, wide.accepted)
        np.testing.assert_array_equal(narrow.confidence, wide.confidence)


def test_an_eagle_drafter_answers_without_loss(tmp_path):
    prompt, names = [5, 3, 90, 11], ("field/qwen3_a", "field/eagle3_qwen3_a")
    engine = FailFast(*(stored(tmp_path, name, "bfloat16")[0] for name in names))
    assert (2, "bfloat16") in dtypes(engine.drafter)
    [answer] = engine.generate([prompt], method="eagle3", max_new_tokens=24, ignore_eos=True)
    best = logits(engine.target, np.asarray([prompt + answer.output_ids]))[0].argmax(-1)
    assert answer.output_ids == best[len(prompt) - 1 : -1].tolist()


def test_integers_of_both_are_the_same(tmp_path):
    narrow, wide = stored(tmp_path, "qwen2_untied", "bfloat16")
    np.testing.assert_array_equal(*(logits(folder, quantize="int8") for folder in (narrow, wide)))


def test_no_pass_makes_a_wide_copy_of_the_matrices(tmp_path):
    def temporaries(folder: Path) -> int:
        model = load_model(folder)
        cache, zero = model.init_cache(1, 512), jnp.zeros((1,), jnp.int32)
        window = jax.jit(lambda model, ids: model.window(ids, cache, zero, jnp.int32(256))[0][:, -1])
        return window.lower(model, jnp.zeros((1, 256), jnp.int32)).compile().memory_analysis().temp_size_in_bytes

    narrow, wide = stored(tmp_path, "qwen2_untied", "bfloat16")
    assert temporaries(narrow) <= temporaries(wide)
