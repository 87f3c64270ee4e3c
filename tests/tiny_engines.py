"""Engines around tiny random models, and a tokenizer for them."""

from __future__ import annotations

import functools

from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast


def new_engine(**options) -> FailFast:
    target = random_model(tiny_config(num_layers=1, max_position_embeddings=600), seed=1)
    return FailFast(target, random_model(diffusion_config(max_position_embeddings=600), seed=2), **options)


@functools.cache
def engine() -> FailFast:
    return new_engine(tokenizer=BytePieces(), drafter_tokenizer=BytePieces())


@functools.cache
def diffusion_engine() -> FailFast:
    return FailFast(random_model(diffusion_config(), seed=2))


class BytePieces:
    """A tokenizer whose tokens are single bytes, most of them halves of a two-byte character."""

    pieces = [b"\xc3" if i % 2 else bytes([0xA0 + i % 32]) for i in range(VOCAB - 2)] + [b"a", b"\n"]

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(VOCAB)}

    def decode(self, ids, skip_special_tokens=True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}
