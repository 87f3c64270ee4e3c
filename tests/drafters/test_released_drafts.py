"""The released code's drafts: `aligned` with stop tokens and with reuse.

The reader here is written from the released loop's behaviour, by full recomputation without a cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.drafters.aligned import MOST_BLOCKS

STOP, MASK, BLOCK, SMALL = 18, VOCAB - 1, 8, 4
LENGTHS = {"spec_len": 4, "max_spec_len": 12}
TAU, THRESHOLD = 0.3, 0.05


class Reader:
    """One draft of the released loop after a text."""

    def __init__(self, model, text: list[int]):
        self.model, self.text, self.first = model, list(text), len(text)
        self.passes, self.listed, self.spec_len = 0, [], LENGTHS["spec_len"]
        self.doubted = self.ended = False

    def best(self, rows: list[int]) -> tuple[list[int], np.ndarray]:
        """The token that each row's logits propose, and its confidence."""
        logits = np.array(self.model.logits([self.text])[0])[rows]
        logits[:, MASK] = -np.inf
        top = logits.max(-1, keepdims=True)
        return logits.argmax(-1).tolist(), 1 / np.exp(logits - top).sum(-1)

    @property
    def drafted(self) -> list[int]:
        """Tokens before the first mask."""
        tokens = self.text[self.first :]
        return tokens[: tokens.index(MASK)] if MASK in tokens else tokens

    def denoise(self, start: int) -> None:
        places = [at for at in range(start, start + SMALL) if self.text[at] == MASK]
        tokens, sure = self.best([at - 1 for at in places])
        self.passes += 1
        self.listed += sure.tolist()
        for index, (at, token) in enumerate(zip(places, tokens)):
            if sure[index] > THRESHOLD or index == int(sure.argmax()):
                self.text[at] = token
        if len(self.drafted) >= self.spec_len:
            self.doubted = min(self.listed) < TAU
            self.ended = self.doubted or len(self.listed) >= LENGTHS["max_spec_len"]
            self.spec_len += 0 if self.ended else LENGTHS["spec_len"]

    def fill(self, start: int) -> None:
        """A block."""
        for small in range(start, start + BLOCK, SMALL):
            while MASK in self.text[small : small + SMALL] and not self.ended:
                self.denoise(small)
                self.ended |= STOP in self.drafted

    def draft(self, rejected: list[int]) -> list[int]:
        if self.first % BLOCK == 0:
            self.text += self.best([-1])[0]
        for _ in range(MOST_BLOCKS):
            if STOP in self.drafted or self.ended:
                break
            start = len(self.text) // BLOCK * BLOCK
            self.text += [MASK] * (start + BLOCK - len(self.text))
            self.fill(start)
            if not self.ended:
                self.text += self.best([-1])[0]
                self.passes += 1
        draft = self.drafted[: self.spec_len]
        if STOP in draft:
            return draft[: draft.index(STOP) + 1]
        return draft + (self.tail(draft, rejected) if self.doubted else [])

    @staticmethod
    def tail(draft: list[int], rejected: list[int]) -> list[int]:
        for size in range(len(draft), 1, -1):
            for at in range(len(rejected) - size + 1):
                if rejected[at : at + size] == draft[-size:]:
                    return rejected[at + size :]
        return []


@pytest.mark.parametrize("reuse", [False, True])
def test_rounds_are_the_released_ones(reuse):
    """The pair's drafts repeat themselves, so that there is something to reuse, and hold a stop token at times."""
    target = random_model(tiny_config(num_layers=1, eos_token_ids=(STOP,)), seed=7, gain=2.0)
    engine = FailFast(target, random_model(diffusion_config(), seed=2, gain=3.0))
    options = {"schedule": "aligned", "tau": TAU, "small_block_size": SMALL, "reuse": reuse} | LENGTHS
    rng = np.random.default_rng(5)
    stopped = longer = whole = 0
    for size in (9, 16, 21, 44):
        text = rng.integers(2, VOCAB - 1, size).tolist()
        result = engine.generate([text], method="failfast", max_new_tokens=40, ignore_eos=False, **options)[0]
        last, accepted = [], 0
        for number, entry in enumerate(result.rounds):
            reader = Reader(engine.drafter, text)
            rejected = last[accepted + 1 :] if reuse else []
            expected = reader.draft(rejected)
            assert entry.drafted == expected, (size, number)
            if number == 0:
                assert entry.passes == reader.passes
            stopped += STOP in expected
            longer += len(expected) > reader.spec_len
            whole += len(text) % BLOCK == 0
            text, last, accepted = text + entry.emitted, entry.drafted, entry.accepted
    assert stopped and whole and bool(longer) is reuse
