"""What a draft of a block drafter costs, beside the reading of what it reads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from failfast_jax import platforms
from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.bench.public_models import nbytes
from failfast_jax.drafters.dspark import DSparkDrafter, block_drafter
from failfast_jax.engine import FailFast
from failfast_jax.runtime import Request

DRAFTS, REPEATS = 50, 9
"""Drafts in a timed run, and timed turns."""


def drafting_report(engine: FailFast, prompt: list[int]) -> dict[str, Any]:
    """Milliseconds of a draft of one block, of the same without the Markov head, and of reading the weights once: the
    layers', the heads', and the rows of the target's head that it scores (medians of interleaved turns)."""
    model = engine.drafter
    models = {"draft": model} | ({} if model.network.markov is None else {"without_markov": model.without_heads()})
    request = Request(prompt, 2 * model.rows)
    capacity = engine.runtime.capacity(len(request.prompt), request.max_new_tokens, model.rows)
    acts = {}
    for name, one in models.items():
        drafter = block_drafter(one, spec_len=one.rows, max_spec_len=one.rows)
        state = engine.runtime.session(drafter, capacity=capacity).prefill([request])
        acts[name] = functools.partial(_drafts, drafter, state.drafter, state.committed)
    ms = {name: 1e3 * seconds / DRAFTS for name, seconds in medians(interleaved(acts, REPEATS)).items()}
    read = nbytes((nnx.state(model.network), model.head))
    if model.network.markov is not None:
        read -= nbytes(model.network.markov.w1[...])  # a row of which is read
    ms["reading"] = 1e3 * read / platforms.bandwidth(2**29)["read"]
    out = {"rows": model.rows, "weight_bytes": read, "ms": ms, "over_reading": ms["draft"] / ms["reading"]}
    if "without_markov" in ms:
        out["markov_share"] = 1 - ms["without_markov"] / ms["draft"]
    return out


@jax.jit
def _drafts(drafter: DSparkDrafter, state: Any, committed: Any) -> Any:
    """`DRAFTS` drafts of one place, one after the other."""

    def body(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        draft, state = drafter.draft(carry[0], committed)
        return state, carry[1] + draft.tokens.sum() + draft.confidence.sum()

    return jax.lax.fori_loop(0, DRAFTS, body, (state, jnp.float32(0)))
