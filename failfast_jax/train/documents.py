"""Training documents: prompts and answers, as token ids in `.npz` files, and batches of them.

A file holds `prompt` and `answer` (ids of all documents, concatenated) and `prompt_len` and `answer_len`
(tokens of each); `python -m failfast_jax.train selfgen` writes folders of such files.

For block diffusion, documents are packed into rows, each beginning at a new block. `--packing none`: one document per
row. `stream`: documents of a row see those before them, as in Fast-dLLM v2's released code.

    block 4, width 12, documents aaaaa bb cccc      .: filler
    row 0   aaaa a... bb..
    row 1   cccc .... ....
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.errors import DataError
from failfast_jax.models.kv_cache import round_up
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.util.files import write_atomically

PARTS = ("prompt", "answer")
ARRAYS = ("prompt", "prompt_len", "answer", "answer_len")
LARGEST_UINT16_VOCABULARY = 65_536
OPEN = 8
"""Rows that may still be added to while documents are dealt out."""
FILLER = -1

Ids = Sequence[int] | np.ndarray
Document = tuple[Ids, Ids] | tuple[Ids, Ids, np.ndarray]
"""Ids of a prompt and of its answer; for a whole conversation also which ids after the first prompt are answers."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents in memory.

    Attributes:
      tokens: per document its prompt's and answer's ids, `[length]` int32.
      prompt_length: tokens of each prompt, `[documents]`.
      labelled: per document which of its tokens are answers, `[length]` bool.
    """

    tokens: list[np.ndarray]
    prompt_length: np.ndarray
    labelled: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: Ids) -> Documents:
        """Returns the documents with these numbers."""
        prompt_length = self.prompt_length[list(indices)]
        return Documents([self.tokens[i] for i in indices], prompt_length, [self.labelled[i] for i in indices])

    def pairs(self) -> list[Document]:
        """Returns prompt and answer of each document: of a conversation, the first prompt and all that follows."""
        return [(row[:start], row[start:]) for row, start in zip(self.tokens, self.prompt_length)]

    def digest(self) -> str:
        """Returns a digest of these documents in this order."""
        lengths = np.asarray([len(row) for row in self.tokens], np.int64)
        tokens, labelled = np.concatenate(self.tokens), np.packbits(np.concatenate(self.labelled))
        parts = (tokens.astype(np.int32), lengths, self.prompt_length.astype(np.int64), labelled)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]

    def frequent_tokens(self, vocab_size: int, count: int, always: Sequence[int] = ()) -> np.ndarray:
        """Returns the `count` most frequent tokens of answers, `always` among them, by ascending id.

        Tokens that never occur fill up by id, so that the result has its size whatever the data.
        """
        answers = np.concatenate(self.tokens)[np.concatenate(self.labelled)]
        counts = np.bincount(answers, minlength=vocab_size).astype(np.int64)
        counts[list(always)] = counts.sum() + 1
        order = np.lexsort((np.arange(vocab_size), -counts))
        return np.sort(order[:count]).astype(np.int32)


def load_documents(
    paths: Sequence[Path],
    vocab_size: int,
    shortest: int,
    longest: int,
    *,
    skip_short: bool = False,
    read: Mapping[str, Callable[[Path], list[Document]]] | None = None,
) -> Documents:
    """Reads files, and folders of them, in the order of their names.

    Args:
      read: readers of other files than `.npz`, by suffix.
      shortest: tokens (prompt and answer) that a document needs: a block.
      longest: documents are cut to this many tokens.
      skip_short: leave out documents below `shortest` instead of refusing the file.

    Raises:
      DataError: nothing to read, a damaged or empty file, ids outside the vocabulary, a short document.
    """
    readers = {".npz": lambda file: read_documents(file, vocab_size), **(read or {})}
    tokens: list[np.ndarray] = []
    prompts: list[int] = []
    labelled: list[np.ndarray] = []
    for file in files(paths, readers):
        reader = readers.get(file.suffix, readers[".npz"])
        for number, (prompt, answer, *marks) in enumerate(reader(file)):
            document = np.concatenate([prompt, answer]).astype(np.int32)[:longest]
            if shortest <= len(document) and len(prompt) + 1 < len(document):
                tokens.append(document)
                prompts.append(len(prompt))
                answers = marks[0] if marks else np.ones(len(answer), bool)
                labelled.append(np.concatenate([np.zeros(len(prompt), bool), answers])[:longest])
            elif not skip_short:
                raise DataError(
                    f"{file}: document {number} has {len(prompt)} + {len(answer)} tokens (cut to {longest}); it needs "
                    f"at least {shortest} and two of an answer: remove it, or pass --skip-short"
                )
    if not tokens:
        where = ", ".join(map(str, paths))
        raise DataError(f"{where}: no usable documents: none has {shortest} tokens, two of them an answer's")
    return Documents(tokens, np.asarray(prompts, np.int32), labelled)


def files(paths: Sequence[Path], kinds: Collection[str]) -> list[Path]:
    """Returns the named files, and those of these suffixes in named folders.

    Raises:
      DataError: nothing is there.
    """
    every: list[Path] = []
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: no such file or folder")
        inside = sorted(file for file in path.iterdir() if file.suffix in kinds) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: no {' or '.join(kinds)} files in this folder")
        every += inside
    return every


def read_documents(file: Path, vocab_size: int) -> list[Document]:
    """Reads the documents of one file.

    Raises:
      DataError: a damaged or empty file, ids outside the vocabulary; the message names the file.
    """
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ARRAYS if name in stored}
    except Exception as error:  # of NumPy, and zipfile's and zlib's own errors for damaged members
        raise DataError(f"{file}: not a readable .npz file ({type(error).__name__}: {error})") from None
    for name in ARRAYS:
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
            raise DataError(f"{file}: array {name!r} is not there as one-dimensional integers, as {ARRAYS} must be")
    prompts, answers = (_split(file, arrays, name, vocab_size) for name in PARTS)
    if len(prompts) != len(answers):
        raise DataError(f"{file}: {len(prompts)} prompts, but {len(answers)} answers")
    return list(zip(prompts, answers))


def _split(file: Path, arrays: Mapping[str, np.ndarray], name: str, vocab_size: int) -> list[np.ndarray]:
    """Returns the ids of each document's prompt or answer."""
    ids, lengths = arrays[name], arrays[f"{name}_len"].astype(np.int64)
    if not len(lengths) or lengths.min() < 1 or lengths.sum() != len(ids):
        raise DataError(f"{file}: {name}_len must hold lengths of at least 1 that add up to the {len(ids)} ids")
    ends = np.cumsum(lengths)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        bad = int(np.argmax(outside))
        place = f"document {int(np.searchsorted(ends, bad, side='right'))}: token id {int(ids[bad])} in {name!r}"
        raise DataError(f"{file}: {place} is outside the target's vocabulary of {vocab_size}")
    return np.split(ids, ends[:-1])


def write_documents(path: Path, documents: Iterable[Document], vocab_size: int) -> None:
    """Writes a file of documents, whole or not at all; ids are uint16 where the vocabulary allows, else uint32."""
    dtype = np.uint16 if vocab_size <= LARGEST_UINT16_VOCABULARY else np.uint32
    arrays = {}
    for name, lists in zip(PARTS, zip(*(document[:2] for document in documents))):
        arrays[name] = np.concatenate([np.asarray(ids, dtype) for ids in lists])
        arrays[f"{name}_len"] = np.asarray([len(ids) for ids in lists], np.int32)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())


def batches(documents: Documents, *, length: int, batch: int, seed: int) -> Any:
    """Returns endless shuffled batches by step number, the same on every machine and run.

    Returns:
      A Grain dataset of dicts: tokens `[batch, length]`, prompt_length, length and document `[batch]`.
    """

    def row(index: int) -> dict[str, np.ndarray]:
        tokens = documents.tokens[index]
        return {
            "tokens": np.pad(tokens, (0, length - len(tokens))),
            "prompt_length": documents.prompt_length[index],
            "length": np.int32(len(tokens)),
            "document": np.int32(index),
        }

    return shuffled(row, len(documents), batch, seed)


def shuffled(row: Callable[[int], dict[str, np.ndarray]], rows: int, batch: int, seed: int) -> Any:
    """Returns endless shuffled batches of rows (dicts of arrays by index), as a Grain dataset by step number."""
    import grain

    return grain.MapDataset.range(rows).seed(seed).shuffle().repeat().map(row).batch(batch)


def packed(documents: Documents, config: TrainConfig) -> list[list[int]]:
    """Deals documents out, in an order that the seed decides, to the first of a few open rows that has room.

    Returns:
      Numbers of documents by row, the same in every epoch.
    """
    order = np.random.default_rng(config.seed).permutation(len(documents)).tolist()
    if config.packing == "none":
        return [[number] for number in order]
    rows: list[list[int]] = []
    room: list[int] = []
    for number in order:
        length = round_up(len(documents.tokens[number]), config.block_size)
        still_open = range(max(len(rows) - OPEN, 0), len(rows))
        row = next((row for row in still_open if room[row] >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(config.seq_len)
        rows[row].append(number)
        room[row] -= length
    return rows


def packed_row(documents: Documents, numbers: list[int], config: TrainConfig) -> dict[str, np.ndarray]:
    """Returns `tokens` int32 `[width]`, `FILLER` after the end of a document, and `labelled` bool `[width]`."""
    tokens = np.full(config.seq_len, FILLER, np.int32)
    labelled = np.zeros(config.seq_len, bool)
    start = 0
    for number in numbers:
        ids = documents.tokens[number]
        tokens[start : start + len(ids)] = ids
        labelled[start : start + len(ids)] = documents.labelled[number]
        # The tokens before a document's first token have nothing to do with it.
        labelled[start] = False
        start += round_up(len(ids), config.block_size)
    return {"tokens": tokens, "labelled": labelled}


def packed_batches(documents: Documents, config: TrainConfig) -> tuple[Any, float]:
    """Returns endless shuffled batches of packed rows by step number, and the share of tokens in them."""
    rows = packed(documents, config)
    share = sum(map(len, documents.tokens)) / (len(rows) * config.seq_len)
    batch = config.batch * config.accumulate
    return shuffled(lambda index: packed_row(documents, rows[index], config), len(rows), batch, config.seed), share
