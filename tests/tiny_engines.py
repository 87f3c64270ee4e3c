"""Engines around tiny random models, and a tokenizer for them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tiny_models import VOCAB, diffusion_config, random_extended, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.engine import Result

ROWS = 5
DRAFT_IDS = np.arange(0, VOCAB, 2, dtype=np.int32)
"""Rows of a block of `extended_engine`, and the ids that its drafter may propose."""


def new_engine(**options) -> FailFast:
    target = random_model(tiny_config(num_layers=1, max_position_embeddings=600), seed=1)
    return FailFast.load(target, random_model(diffusion_config(max_position_embeddings=600), seed=2), **options)


@functools.cache
def engine() -> FailFast:
    return new_engine(tokenizer=BytePieces(), drafter_tokenizer=BytePieces())


@functools.cache
def diffusion_engine() -> FailFast:
    return FailFast.load(random_model(diffusion_config(), seed=2))


@functools.cache
def extended_engine() -> FailFast:
    """Its drafter knows every second token."""
    target = random_model(tiny_config(num_layers=3))
    layers = {"context_layers": (1, 2), "row_features": (0, 2)}
    return FailFast.load(target, random_extended(target, rows=ROWS, seed=1, draft_ids=DRAFT_IDS, **layers))


@functools.cache
def standalone_engine() -> FailFast:
    return FailFast.load(random_model(tiny_config(num_layers=1)), random_model(diffusion_config(), seed=2))


def lossless(engine: FailFast, prompts: list[list[int]], **options: Any) -> list[Result]:
    """Answers with a method, and checks that the text is vanilla's."""
    taken = {"max_new_tokens", "ignore_eos", "temperature", "seed", "exact"} & options.keys()
    plain = engine.generate(prompts, method="vanilla", **{name: options[name] for name in taken})
    results = engine.generate(prompts, **options)
    assert [result.output_ids for result in results] == [result.output_ids for result in plain]
    return results


class BytePieces:
    """A tokenizer whose tokens are single bytes, most of them halves of a two-byte character."""

    pieces = [b"\xc3" if i % 2 else bytes([0xA0 + i % 32]) for i in range(VOCAB - 2)] + [b"a", b"\n"]

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(VOCAB)}

    def decode(self, ids, skip_special_tokens=True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}
