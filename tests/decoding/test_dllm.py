"""Method `dllm` where it samples: as Fast-dLLM v2's released code does."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from distributions import chi_square, filtered_probability
from tiny_engines import diffusion_engine
from tiny_models import VOCAB, diffusion_config, random_model, sampling

from failfast_jax.decoding import diffusion_decoding, draft_states
from failfast_jax.decoding.decode_state import MAX_EOS_TOKENS, Prompts
from failfast_jax.decoding.diffusion_decoding import BlockSchedule

SMALL, BLOCK, PART = 5, 4, 4
"""Of the model whose answers are enumerated: tokens beside the mask, block and small block."""
TEMPERATURE, TOP_P = 2.0, 0.9
SAMPLES = 6_000


@functools.cache
def model():
    config = diffusion_config(BLOCK, vocab_size=SMALL + 1, mask_token_id=SMALL)
    return random_model(config, seed=6, gain=1.5)


PROMPT = [3, 1, 4, 1]


@functools.cache
def released_distribution(threshold: float) -> np.ndarray:
    """Probability of each block `[first, three more]` after the prompt, by numpy alone.

    Every pass draws every masked position of the small block anew, from its tempered nucleus; those whose drawn token
    is likelier than the threshold stay, and the likeliest. The first token is the argmax.
    """
    mask = SMALL
    whole = np.indices((SMALL + 1,) * (BLOCK - 1)).reshape(BLOCK - 1, -1).T
    first = int(np.asarray(model().logits([PROMPT]))[0, -1, :SMALL].argmax())
    states = np.column_stack([np.full(len(whole), first), whole])
    texts = np.column_stack([np.tile(PROMPT, (len(states), 1)), states])
    logits = {tuple(s): row for s, row in zip(states.tolist(), np.asarray(model().logits(texts))[:, len(PROMPT) :])}
    step = functools.cache(lambda s, at: filtered_probability(logits[s][at - 1, :SMALL], TEMPERATURE, 0, TOP_P))
    probability = np.zeros((SMALL,) * (BLOCK - 1))

    def go_on(state: tuple[int, ...], weight: float) -> None:
        masked = [at for at in range(BLOCK) if state[at] == mask]
        if not masked:
            probability[state[1:]] += weight
            return
        places = [at for at in masked if at // PART == masked[0] // PART]
        draws = [[(token, p) for token, p in enumerate(step(state, at)) if p > 0] for at in places]
        for drawn in np.ndindex(*map(len, draws)):
            chosen = [draws[i][j] for i, j in enumerate(drawn)]
            best = int(np.argmax([p for _, p in chosen]))
            after = list(state)
            for i, (token, p) in enumerate(chosen):
                if i == best or p > threshold:
                    after[places[i]] = token
            go_on(tuple(after), weight * float(np.prod([p for _, p in chosen])))

    go_on((first, *[mask] * (BLOCK - 1)), 1.0)
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-6)
    return probability.ravel()


@jax.jit
def sample(model, threshold):
    """Answers `[SAMPLES, D]` to a prompt of one block."""

    def answer(sequence):
        options = sampling(1, TEMPERATURE, 0, TOP_P, seed=7, sequence=sequence)
        ends = {"max_blocks": np.ones(1, np.int32), "limit": np.full(1, 2 * BLOCK, np.int32)}
        eos, lengths = np.full((1, MAX_EOS_TOKENS), -1, np.int32), np.full(1, BLOCK, np.int32)
        prompts = Prompts(np.asarray([PROMPT], np.int32), lengths, eos, options)
        state = diffusion_decoding.init_state(model, prompts, capacity=2 * BLOCK, **ends)
        state = draft_states.generate(model, state, threshold, None, 99, schedule=BlockSchedule(PART))
        return state.text[0, BLOCK : 2 * BLOCK]

    return jax.lax.map(answer, np.arange(SAMPLES), batch_size=500)


def p_value(blocks, threshold: float) -> float:
    assert len(np.unique(blocks[:, 0])) == 1
    cells = np.asarray(blocks)[:, 1:] @ SMALL ** np.arange(BLOCK - 1)[::-1]
    return chi_square(cells, released_distribution(threshold), least=5)


@pytest.mark.parametrize("threshold, other", [(1.0, 0.4), (0.4, 1.0)])
def test_samples_follow_the_released_rule(threshold, other):
    blocks = sample(model(), np.float32(threshold))
    assert p_value(blocks, threshold) > 1e-3
    assert p_value(blocks, other) < 1e-3  # a wrong rule would be noticed


def test_samples_of_an_engine():
    """The next block's first token, which a storing pass gives, is the argmax; the nucleus is the released one."""
    engine, prompt = diffusion_engine(), np.random.default_rng(1).integers(2, VOCAB - 1, 16).tolist()

    def text(temperature: float = 2.0, seed: int = 0, **options) -> list[int]:
        common = {"method": "dllm", "small_block_size": 4, "ignore_eos": True, "max_new_tokens": 24}
        return engine.generate(prompt, temperature=temperature, seed=seed, **common, **options)[0].output_ids

    texts = [text(seed=seed) for seed in range(6)]
    assert {ids[0] for ids in texts} == {text(temperature=0.0)[0]}
    assert len({tuple(ids) for ids in texts}) == 6
    assert texts[4] == text(seed=4, top_p=0.95) and texts != [text(seed=seed, top_p=1.0) for seed in range(6)]
    assert engine.resolve(method="dllm").top_p == 0.95 and engine.resolve(method="lookup").top_p == 1.0
