"""Cost of a block drafter's draft, beside the reading of its weights: the part `drafting` of `bench micro`."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters.dspark import DSparkDrafter
from failfast_jax.engine import FailFast
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.public_data.model_shapes import nbytes
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.util import hardware

DRAFTS, REPEATS = 50, 9
"""Drafts in a timed run, and timed turns."""
AGAIN = 20
"""How often rows are gone over again to time that: a difference of a few hundredths of a draft is lost in noise."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class _OverAgain(DSparkDrafter):
    """Goes over a block's rows `AGAIN` times more than needed."""

    def in_turn(self, hidden, logits, positions, behind, committed):
        one = functools.partial(DSparkDrafter.in_turn, self, hidden, logits, positions)

        def body(_: Any, found: Any) -> Any:
            # No id is below 0, which a compiler does not know: each turn waits for the one before; none is left out.
            state, last = behind
            return one((state, jnp.where(found[0][:, 0] < 0, 0, last)), committed)

        return jax.lax.fori_loop(0, AGAIN, body, one(behind, committed))


def drafting_report(engine: FailFast, prompt: list[int]) -> dict[str, Any]:
    """Milliseconds of a draft of one block, of what the Markov head takes of it, of a draft without both heads, and of
    reading the weights once: the layers', the heads', and the rows of the target's head that it scores (medians of
    interleaved turns)."""
    model = engine.drafter
    rows = {"spec_len": model.rows, "max_spec_len": model.rows}
    drafters = {"draft": DSparkDrafter(model=model, **rows)}
    if model.network.markov is not None:
        drafters["over_again"] = _OverAgain(model=model, **rows)
        drafters["without_heads"] = DSparkDrafter(model=model.without_heads(), **rows)
    request = Request(prompt, 2 * model.rows)
    capacity = engine.runtime.capacity(len(request.prompt), request.max_new_tokens, model.rows)
    acts = {}
    for name, drafter in drafters.items():
        state = engine.runtime.session(drafter, capacity=capacity, decodes=False).prefill([request])
        acts[name] = functools.partial(drafts_in_a_row, drafter, state.drafter, state.committed, DRAFTS)
    ms = {name: 1e3 * seconds / DRAFTS for name, seconds in medians(interleaved(acts, REPEATS)).items()}
    read = nbytes((nnx.state(model.network), model.head))
    if model.network.markov is not None:
        read -= nbytes(model.network.markov.w1[...])  # a row of which is read
        ms["markov"] = (ms.pop("over_again") - ms["draft"]) / AGAIN
    ms["reading"] = 1e3 * read / hardware.bandwidth(2**29)["read"]
    out = {"rows": model.rows, "weight_bytes": read, "ms": ms, "over_reading": ms["draft"] / ms["reading"]}
    if "markov" in ms:
        out["markov_share"] = ms["markov"] / ms["draft"]
    return out


@jax.jit
def drafts_in_a_row(drafter: Drafter, state: Any, committed: Any, count: ArrayLike) -> tuple[Any, jax.Array, jax.Array]:
    """`count` drafts of one place, one after the other; the passes of the first row's in all."""

    def body(_: Any, carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        before, tokens, passes = carry
        draft, after = drafter.draft(before, committed)
        # Each draft begins where the first one began: only what lies in caches, which are large, is handed on.
        state = jax.tree.map(lambda new, old: new if _is_cache(new) else old, after, before, is_leaf=_is_cache)
        return state, tokens + draft.tokens.sum() + draft.confidence.sum(), passes + draft.passes[0]

    return jax.lax.fori_loop(0, count, body, (state, jnp.float32(0), jnp.int32(0)))


def _is_cache(value: Any) -> bool:
    return isinstance(value, KVCache)
