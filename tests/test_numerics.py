"""Settings of JAX that a user may have made leave every text as it is."""

from __future__ import annotations

import json

import pytest
from checkpoint_files import GOLDEN, run_python
from tiers import tiers

from failfast_jax import FailFast

PROMPTS = [[3, 14, 15], [92, 65, 35, 92, 65]]
DRAFTS = {"method": "failfast", "spec_len": 3, "max_spec_len": 6, "tau": 0.2}
PLAIN, SAMPLED = {"method": "vanilla"}, {"temperature": 1.0, "seed": 7}
SETTINGS = {
    "types and draws": (
        "JAX_ENABLE_X64=1 JAX_DEFAULT_PRNG_IMPL=rbg JAX_THREEFRY_PARTITIONABLE=0 JAX_HIGH_DYNAMIC_RANGE_GUMBEL=1 "
        "JAX_NUMPY_DTYPE_PROMOTION=strict JAX_NUMPY_RANK_PROMOTION=raise JAX_TRANSFER_GUARD=disallow"
        " JAX_RANDOM_SEED_OFFSET=5"
    ),
    "for debugging": "JAX_DISABLE_JIT=1 JAX_DEBUG_NANS=1 JAX_DEBUG_INFS=1 JAX_DEFAULT_MATMUL_PRECISION=highest",
    "checks": (
        "JAX_DEBUG_KEY_REUSE=1 JAX_CHECK_TRACER_LEAKS=1 JAX_ENABLE_CHECKS=1 JAX_DEFAULT_PRNG_IMPL=unsafe_rbg "
        "JAX_DEFAULT_MATMUL_PRECISION=BF16_BF16_F32"
    ),
}


def answers(thorough: bool = False) -> dict[str, list[list[int]]]:
    """Greedy and sampled drafts for two prompts; if `thorough`, plain, exact and rejection sampling, too."""
    engine = FailFast(GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied")
    cases = {"greedy": DRAFTS, "sampled": SAMPLED | DRAFTS}
    if thorough:
        cases |= {"greedy, plain": PLAIN, "sampled, plain": SAMPLED | PLAIN, "exact": DRAFTS | {"exact": True}}
        cases["rejection"] = DRAFTS | {"acceptance": "rejection", "temperature": 0.8, "top_p": 0.9, "top_k": 30}
    texts = {"logits": engine.target.logits(PROMPTS[:1]).argmax(-1).tolist()}
    for name, options in cases.items():
        results = engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, **options)
        texts[name] = [result.output_ids for result in results]
    return texts


@pytest.mark.parametrize("name", tiers(SETTINGS, quick=["types and draws"]))
def test_settings_change_no_text(name):
    thorough = name != "types and draws"
    program = f"import json, test_numerics; print(json.dumps(test_numerics.answers({thorough})))"
    ended = run_python("-c", program, **dict(setting.split("=") for setting in SETTINGS[name].split()))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == answers(thorough)
