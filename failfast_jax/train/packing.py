"""Sequence packing: several documents in a row of training tokens, each beginning at a new block.

`--packing none`: one document per row. `stream`: documents of a row see those before them, as in Fast-dLLM v2's
released code. `separate`: documents of a row see only themselves.

    block 4, width 12, documents aaaaa bb cccc      .: filler
    row 0   aaaa a... bb..      segment 1 1 2
    row 1   cccc .... ....      segment 1 0 0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from failfast_jax.train.documents import Documents, shuffled
from failfast_jax.train.train_config import TrainConfig

OPEN = 8
"""Rows that may still be added to while documents are dealt out."""
FILLER = -1


def packed(lengths: list[int], width: int, packing: str) -> list[list[int]]:
    """Deals documents out, in their order, to the first of a few open rows that has room: numbers by row.

    Args:
      lengths: at most `width` each.
      packing: one of `train_config.PACKINGS`.
    """
    if packing == "none":
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    room: list[int] = []
    first = 0  # rows before it are closed
    for number, length in enumerate(lengths):
        for row in range(first, len(rows)):
            if room[row] >= length:
                break
        else:
            row = len(rows)
            rows.append([])
            room.append(width)
            first = max(first, len(rows) - OPEN)
        rows[row].append(number)
        room[row] -= length
    return rows


class PackedRows:
    """Rows of documents by index, for Grain to shuffle and batch.

    Which documents share a row depends on `seed` alone, and is the same in every epoch.

    Args:
      width: tokens of a row, a multiple of `block`.
      packing: one of `train_config.PACKINGS`.
    """

    def __init__(self, documents: Documents, width: int, block: int, seed: int, packing: str):
        self.documents, self.width, self.block, self.separate = documents, width, block, packing == "separate"
        self._order = np.random.default_rng(seed).permutation(len(documents)).tolist()
        self._rows = packed([self._blocks(i) * block for i in self._order], width, packing)

    def _blocks(self, index: int) -> int:
        return -(-len(self.documents.tokens[index]) // self.block)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns `tokens` int32 `[width]`, `FILLER` after the end of a document; `labelled` bool `[width]`; if packed
        as `separate`, `segment` int32 `[width / block]`: the number of the row's document from 1, 0 at its free end."""
        tokens = np.full(self.width, FILLER, np.int32)
        labelled = np.zeros(self.width, bool)
        segment = np.zeros(self.width // self.block, np.int32)
        start = 0
        for number, place in enumerate(self._rows[index], 1):
            document = self._order[place]
            ids = self.documents.tokens[document]
            tokens[start : start + len(ids)] = ids
            labelled[start : start + len(ids)] = self.documents.answers(document)
            # The tokens before a document's first token have nothing to do with it.
            labelled[start] = False
            blocks = self._blocks(document)
            segment[start // self.block :][:blocks] = number
            start += blocks * self.block
        row = {"tokens": tokens, "labelled": labelled}
        return row | {"segment": segment} if self.separate else row


def packed_batches(documents: Documents, config: TrainConfig) -> tuple[Any, float]:
    """Returns endless shuffled batches of packed rows by step number, and the share of tokens in them."""
    rows = PackedRows(documents, config.seq_len, config.block_size, config.seed, config.packing)
    share = sum(map(len, documents.tokens)) / (len(rows) * config.seq_len)
    return shuffled(rows, config.batch * config.accumulate, config.seed), share
