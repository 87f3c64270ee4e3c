"""The check that decides which widths may serve under `exact`."""

from __future__ import annotations

import jax
import pytest
from tiny_models import random_model, tiny_config

from failfast_jax.decoding.exact_widths import interchangeable_widths
from failfast_jax.models.transformer import Decoder

pytestmark = pytest.mark.optimized

WIDTHS = (16, 64)


def patch_window(monkeypatch, change) -> None:
    window = Decoder.window

    def patched(self, tokens, *rest):
        hidden, cache, features = window(self, tokens, *rest)
        return *change(tokens.shape, hidden, cache), features

    monkeypatch.setattr(Decoder, "window", patched)


@pytest.mark.parametrize("part", ["hidden", "cache"])
def test_widths_with_other_rows_are_found(monkeypatch, part):
    """One unit in the last place is enough, in the logits or only in what is cached."""
    model = random_model(tiny_config())
    before = interchangeable_widths(model, WIDTHS)

    def change(shape, hidden, cache):
        if shape[1] == 16:
            if part == "hidden":
                hidden = hidden * (1 + 2.0**-22)
            else:
                cache = jax.tree.map(lambda x: x * (1 + 2.0**-22), cache)
        return hidden, cache

    patch_window(monkeypatch, change)
    assert interchangeable_widths(model, WIDTHS) == before - {16}


def test_the_rows_of_the_whole_batch_count(monkeypatch):
    """Another kernel from 128 rows on: at batch 1 no width here reaches it, at batch 2 the reference does."""
    model = random_model(tiny_config())
    before = {batch: interchangeable_widths(model, WIDTHS, batch=batch) for batch in (1, 2)}
    patch_window(monkeypatch, lambda s, hidden, cache: (hidden * (2 if s[0] * s[1] >= 128 else 1), cache))
    assert interchangeable_widths(model, WIDTHS, batch=1) == before[1]
    assert interchangeable_widths(model, WIDTHS, batch=2) == before[2] & {64}
