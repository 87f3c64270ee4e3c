"""The round inside a program of your own, with a stopping rule of your own.

    python examples/own_jit.py TARGET DRAFTER

TARGET is an autoregressive model, DRAFTER a block-diffusion model of the same tokens. Everything from the prompt to
the counts is one `jit`: models, drafter and state are pytrees.
"""

from __future__ import annotations

import argparse
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax import load_model
from failfast_jax.decoding import (
    Plan,
    Prompts,
    StopRule,
    generate,
    greedy_sampling,
    init_state,
    make_plan,
    prefill,
    stop_tokens,
)
from failfast_jax.drafters.block_diffusion import Wide

CAPACITY = 256
PROMPTS = [[7, 12, 100, 5], [3, 9]]
"""Any ids: whoever knows the models' tokenizer takes that."""


@flax.struct.dataclass
class Surprise(StopRule):
    """Ends a draft once the chance that all of it is right, by its confidences, falls below `least`."""

    least: float

    def stops(self, draft, memory):
        columns = jnp.arange(draft.confidence.shape[1])
        inside = columns < draft.drafted[:, None]
        chance = jnp.exp(jnp.sum(jnp.log(jnp.maximum(draft.confidence, 1e-9)), axis=1, where=inside))
        return chance < self.least


@functools.partial(jax.jit, static_argnames="plan")
def answer(target, drafter, tokens, lengths, limits, eos, *, plan: Plan):
    """Answers a batch: ids `[B, T]`, lengths `[B]`, and the mean length of a draft `[B]`."""
    batch, width = tokens.shape
    prompts = Prompts(tokens, lengths, eos, greedy_sampling(batch))
    state = init_state(target, drafter, prompts, limits, capacity=CAPACITY, plan=plan)
    state = prefill(target, drafter, state, prompt_tokens=width, plan=plan)
    state = generate(target, drafter, state, plan=plan)
    drafted = jnp.sum(state.log.draft_length, axis=1)
    return state.tokens, state.length, drafted / jnp.maximum(jnp.sum(state.log.draft_length > 0, axis=1), 1)


def main(target: str, drafter: str, prompts: list[list[int]], limit: int = 24) -> list[list[int]]:
    """Prints each answer, in ids, with its mean draft length; returns the answers."""
    reader, model = load_model(target), load_model(drafter)
    drafts = Wide(model=model, vocab=reader.config.vocab_size, rule=Surprise(0.01))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    ids, ends, drafted = answer(
        reader,
        drafts,
        tokens,
        lengths,
        np.full(len(prompts), limit, np.int32),
        stop_tokens(reader.config.eos_token_ids, len(prompts)),
        plan=make_plan(drafts, platform=jax.default_backend()),
    )
    answers = [row[begin:end].tolist() for row, begin, end in zip(np.asarray(ids), lengths, np.asarray(ends))]
    for number, (actual, length) in enumerate(zip(answers, drafted)):
        print(f"{number}: {actual}, {length:.1f} tokens a draft")
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter"):
        parser.add_argument(name, help="a folder or a Hub id")
    main(**vars(parser.parse_args()), prompts=PROMPTS)
