"""What a TPU runs, interpreted on a CPU (`--attention simulated-tpu`), answers as plain jnp does in a TPU's widths.

As a script: a named case on two devices.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":  # more devices than are used: each keeps a host thread waiting while it is simulated
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python
from tiers import tiers
from tiny_models import (
    diffusion_config,
    fond_dspark,
    fond_eagle,
    fond_of,
    random_extended,
    random_model,
    tiny_config,
)

from failfast_jax import FailFast
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from failfast_jax.kernels.kernel_table import SIMULATED_TPU
from failfast_jax.models.transformer import Decoder
from failfast_jax.results import Round

SIZES = {"head_dim": 64, "max_position_embeddings": 1024}
FAVOURITE = 7
"""A token that the models like, so that drafts are accepted; what else they say depends on all of the text."""
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5])
LONG = tuple(np.random.default_rng(seed).integers(2, 38, length).tolist() for seed, length in ((3, 515), (4, 140)))
"""Beyond one tile of the cache, which here has 512 positions or more, and within one."""


def target(num_layers: int = 1, dtype: str = "float32") -> Decoder:
    model = random_model(tiny_config(num_layers=num_layers, **SIZES), seed=1, gain=2.0, dtype=dtype)
    return fond_of(model, {FAVOURITE: 2.0})


def diffusion(block: int = 8, fond: float = 4.0) -> Decoder:
    return fond_of(random_model(diffusion_config(block, **SIZES), seed=2, gain=2.0), {FAVOURITE: fond})


def sdar() -> Decoder:
    """Its models have blocks of 4."""
    kind = {"model_type": "sdar", "token_shift": False, "qk_norm": True, "qkv_bias": False}
    return fond_of(random_model(diffusion_config(4, **kind, **SIZES), seed=2, gain=2.0), {FAVOURITE: 1.0})


def pair() -> tuple[Decoder, Decoder]:
    return target(), diffusion()


def reader(make: Callable, *args: Any, **options: Any) -> Callable[[], tuple[Decoder, Any]]:
    """A target, and a drafter that reads its features."""

    def models() -> tuple[Decoder, Any]:
        model = target(num_layers=2)
        return model, make(model, *args, **options)

    return models


@dataclasses.dataclass(frozen=True)
class Case:
    """Models, and what they are asked."""

    models: Callable[[], tuple]
    options: dict[str, Any]
    prompts: Sequence[list[int]] = PROMPTS


PAPER = {"method": "failfast", "spec_len": 3, "max_spec_len": 6, "tau": 0.2}
LOOKUP = {"method": "lookup", "max_spec_len": 7, "temperature": 0.0}
WRITES = {"method": "dllm", "threshold": 0.2, "max_new_tokens": 34}
CASES = {
    "vanilla": Case(lambda: (target(),), {"method": "vanilla"}),
    "lookup": Case(lambda: (target(),), LOOKUP),
    "wide": Case(pair, PAPER),
    "wide, long prompts": Case(pair, PAPER, LONG),
    "by cost": Case(pair, {"method": "auto"}),
    "aligned": Case(pair, {**PAPER, "schedule": "aligned"}),
    "fast-dllm": Case(pair, {"method": "fast-dllm"}),
    "specdiff": Case(pair, {"method": "specdiff"}),
    "ar": Case(lambda: (target(), target()), {"method": "ar", "dynamic": True}),
    "dspark": Case(reader(fond_dspark, "dspark", rows=7), {"method": "dspark"}),
    "dflash": Case(reader(fond_dspark, "dflash", rows=7), {"method": "dflash"}),
    "extended": Case(reader(random_extended), {"method": "failfast"}),
    "eagle, chain": Case(reader(fond_eagle, FAVOURITE), {"method": "eagle3", "spec_len": 3}),
    "eagle, tree": Case(
        reader(fond_eagle, FAVOURITE), {"method": "eagle3", "tree_budget": 7, "tree_depth": 2, "tree_top_k": 2}
    ),
    "dllm": Case(lambda: (diffusion(fond=1.0),), WRITES),
    "dllm, block cache": Case(lambda: (diffusion(32, fond=1.0),), {**WRITES, "block_cache": True}),
    "dllm, spiffy": Case(lambda: (diffusion(32, fond=1.0),), {**WRITES, "spiffy": 0}),
    "dllm, long prompts": Case(lambda: (diffusion(32, fond=1.0),), WRITES, LONG),
    "exact wide": Case(pair, {**PAPER, "exact": True}),
    "bfloat16": Case(lambda: (target(dtype="bfloat16"),), LOOKUP),
    # Windows that fill no hardware tile, or more than a kernel takes at once.
    "blocks of 4": Case(lambda: (sdar(),), WRITES),
    "blocks of 10": Case(lambda: (target(), diffusion(10)), PAPER),
    "blocks of 12, long prompts": Case(lambda: (target(), diffusion(12)), PAPER, LONG),
    "blocks of 136": Case(lambda: (diffusion(136, fond=1.0),), WRITES),
    "small blocks of 4": Case(
        lambda: (diffusion(32, fond=1.0),), {**WRITES, "block_cache": True, "small_block_size": 4}
    ),
    "drafts of 200": Case(
        lambda: (target(),), {**LOOKUP, "max_spec_len": 200, "max_new_tokens": 300}, ([*range(2, 38)] * 5, PROMPTS[1])
    ),
}


def check(case: Case, **options: Any) -> None:
    """Texts and rounds of a simulated TPU are those of plain jnp in a TPU's widths and defaults.

    Args:
      options: options of both engines.
    """
    request = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 3} | case.options
    answers = []
    for kernel in (SIMULATED_TPU, "reference"):
        engine = FailFast(*case.models(), attention=kernel, widths=DEFAULT_WIDTHS["tpu"], **options)
        engine.platform = engine.runtime.platform = "tpu"
        answers.append(engine.generate(list(case.prompts), **request))
    for simulated, plain in zip(*answers, strict=True):
        assert simulated.output_ids == plain.output_ids
        for rounds in zip(simulated.rounds, plain.rounds):
            (counts, confidence), (expected, certain) = map(_parts, rounds)
            assert counts == expected
            np.testing.assert_allclose(confidence, certain, atol=1e-4)


def _parts(entry: Round) -> tuple[dict[str, Any], list[float]]:
    """What a round counts, and the drafter's confidences."""
    counts = entry.to_dict() | {"expected": None}
    return counts, counts.pop("confidence")


QUICK = ("dflash", "dllm, block cache", "dllm, spiffy", "dllm, long prompts", "bfloat16", "blocks of 10")


@pytest.mark.parametrize("name", tiers(CASES, quick=QUICK, long=None))
def test_answers_are_those_of_plain_jnp(name):
    check(CASES[name])


@pytest.mark.long
def test_two_devices_share_a_model():
    done = run_python("tests/test_simulated_tpu.py", "wide")
    assert done.returncode == 0, done.stderr[-3000:]


def test_types_widths_and_kernels_are_those_of_a_tpu():
    host = FailFast(GOLDEN / "qwen2_untied", attention=SIMULATED_TPU)
    # Heads of 16 are none that the TPU's kernels take: plain jnp serves them there, too.
    assert host.target.dtype == "bfloat16" and host.platform == "tpu"
    assert host.target.execution.resolved(host.target.dtype, 16) == "reference"
    assert host.target.execution.resolved(host.target.dtype, 128) == SIMULATED_TPU
    assert host.generate(PROMPTS[0], method="vanilla", max_new_tokens=2)[0].output_ids


if __name__ == "__main__":
    check(CASES[sys.argv[1]], tensor_parallel=2)
