"""Answers on a simulated TPU, and by plain jnp in the TPU's widths.

As a script: the cases that are named, each on two devices; prints what differs, by case, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if __name__ == "__main__":  # more devices than are used: each keeps a host thread waiting while it is simulated
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np
from tiny_models import (
    diffusion_config,
    fond_dspark,
    fond_eagle,
    fond_of,
    random_dspark,
    random_extended,
    random_model,
    tiny_config,
)

from failfast_jax import FailFast
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from failfast_jax.engine import Result
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels.kernel_table import SIMULATED_TPU
from failfast_jax.models.transformer import Decoder
from failfast_jax.results import Round
from failfast_jax.runtime.model_runtime import Request

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
    own = {"model_type": "sdar", "token_shift": False, "qk_norm": True, "qkv_bias": False}
    return fond_of(random_model(diffusion_config(4, **own, **SIZES), seed=2, gain=2.0), {FAVOURITE: 1.0})


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
    "dspark, sliding window": Case(
        reader(random_dspark, rows=7, sliding_windows=(6,), sliding_is_causal=True), {"method": "dspark"}
    ),
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
    "exact lookup": Case(lambda: (target(),), {**LOOKUP, "exact": True}),
    "exact wide": Case(pair, {**PAPER, "exact": True}),
    "bfloat16": Case(lambda: (target(dtype="bfloat16"),), LOOKUP),
    # Windows that fill no hardware tile, or more than a kernel takes at once.
    "blocks of 4": Case(lambda: (sdar(),), WRITES),
    "blocks of 4 draft": Case(lambda: (target(), sdar()), PAPER),
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


def engine(models: tuple, kernel: str, **options: Any) -> FailFast:
    """Widths and defaults are a TPU's, whichever kernel attends."""
    built = FailFast(*models, attention=kernel, widths=DEFAULT_WIDTHS["tpu"], **options)
    built.platform = built.runtime.platform = "tpu"
    return built


def difference(case: Case, **options: Any) -> str | None:
    """Where the answers of a simulated TPU differ from those of plain jnp; None: texts and rounds are the same.

    Args:
      options: of both engines.
    """
    request = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 3} | case.options
    answers = [
        engine(case.models(), kernel, **options).generate(list(case.prompts), **request)
        for kernel in (SIMULATED_TPU, "reference")
    ]
    return next(_differences(*answers), None)


def rows_come_and_go(kernel: str) -> tuple[list[list[int]], list[Any], np.ndarray]:
    """What two rows say, round by round: one goes on while another request takes the place of its ended neighbour. And
    the log-probabilities of that."""
    options = {name: value for name, value in PAPER.items() if name != "method"}
    host = engine(pair(), kernel)
    drafter = host.build_drafter(GenerationConfig(PAPER["method"], options=options))
    work, single = (host.runtime.session(drafter, batch=rows, capacity=128, logprobs=1) for rows in (2, 1))
    state = work.advance(work.prefill([Request(prompt, 12) for prompt in PROMPTS]), 2)
    state = work.advance(work.end(state, [0]), 2)
    state = work.advance(work.insert(state, 0, single.prefill([Request([11, 12, 4], 8)])))
    logprobs = [entry.logprob for row in work.logprobs(state, {0: 0, 1: 0}).values() for entry in row]
    counts = [_parts(entry)[0] for log in work.rounds(state) for entry in log.rounds]
    return work.read(state).ids, counts, np.asarray(logprobs)


def _differences(simulated: list[Result], plain: list[Result]) -> Iterator[str]:
    for row, (one, other) in enumerate(zip(simulated, plain, strict=True)):
        if one.output_ids != other.output_ids:
            yield f"row {row}: text {one.output_ids}, not {other.output_ids}"
        for number, rounds in enumerate(zip(one.rounds, other.rounds)):
            (counts, sure), (wanted, as_sure) = map(_parts, rounds)
            if counts != wanted or not np.allclose(sure, as_sure, atol=1e-4):
                yield f"row {row}, round {number}: {counts}, sure {sure}; not {wanted}, {as_sure}"


def _parts(entry: Round) -> tuple[dict[str, Any], list[float]]:
    """What a round counts, and the drafter's confidences."""
    found = entry.to_dict()
    sure, _ = found.pop("confidence"), found.pop("expected", None)
    return found, sure


if __name__ == "__main__":
    print(json.dumps({name: difference(CASES[name], tensor_parallel=2) for name in sys.argv[1:]}))
