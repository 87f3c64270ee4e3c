"""Training documents: prompts and answers, as token ids in `.npz` files.

A file holds `prompt` and `answer` (ids of all documents, concatenated) and `prompt_len` and `answer_len`
(tokens of each); `python -m failfast_jax.train selfgen` writes folders of such files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.errors import InputError
from failfast_jax.util.files import write_atomically

PARTS = ("prompt", "answer")
ARRAYS = ("prompt", "prompt_len", "answer", "answer_len")
FILES, HUB = (".npz", ".jsonl", ".parquet"), "hub"
"""Kinds of training data: suffixes of files, and datasets of the Hugging Face Hub."""
LARGEST_UINT16_VOCABULARY = 65_536

Ids = Sequence[int] | np.ndarray
Document = tuple[Ids, Ids] | tuple[Ids, Ids, np.ndarray]
"""Ids of a prompt and of its answer; for a whole conversation also which ids after the first prompt are answers."""


class DataError(InputError):
    """Training data that cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents in memory.

    Attributes:
      tokens: per document its prompt's and answer's ids, `[length]` int32.
      prompt_length: tokens of each prompt, `[documents]`.
      labelled: per document which of its tokens are answers, `[length]` bool; None: all after the prompts.
    """

    tokens: list[np.ndarray]
    prompt_length: np.ndarray
    labelled: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: Ids) -> Documents:
        """Returns the documents with these numbers."""
        labelled = None if self.labelled is None else [self.labelled[i] for i in indices]
        return Documents([self.tokens[i] for i in indices], self.prompt_length[list(indices)], labelled)

    def answers(self, index: int) -> np.ndarray:
        """Returns a mask of the tokens of a document that are answers."""
        if self.labelled is not None:
            return self.labelled[index]
        return np.arange(len(self.tokens[index])) >= self.prompt_length[index]

    def pairs(self) -> list[Document]:
        """Returns prompt and answer of each document: of a conversation, the first prompt and all that follows."""
        return [(row[:start], row[start:]) for row, start in zip(self.tokens, self.prompt_length)]

    def digest(self) -> str:
        """Returns a digest of these documents in this order."""
        lengths = np.asarray([len(row) for row in self.tokens], np.int64)
        parts = (np.concatenate(self.tokens).astype(np.int32), lengths, self.prompt_length.astype(np.int64))
        labelled = () if self.labelled is None else (np.packbits(np.concatenate(self.labelled)),)
        return hashlib.sha256(b"".join(part.tobytes() for part in (*parts, *labelled))).hexdigest()[:16]

    def split(self, held_out: int) -> tuple[Documents, Documents]:
        """Returns the training documents and the `held_out` last ones.

        Raises:
          DataError: nothing would be left to train on.
        """
        if held_out >= len(self):
            raise DataError(f"--held-out {held_out}: there are only {len(self)} documents")
        cut = len(self) - held_out
        return self.take(range(cut)), self.take(range(cut, len(self)))

    def frequent_tokens(self, vocab_size: int, count: int, always: Sequence[int] = ()) -> np.ndarray:
        """Returns the `count` most frequent tokens of the answers, `always` among them, by ascending id.

        Tokens that never occur fill up by id, so that the result has its size whatever the data.
        """
        answers = np.concatenate([answer for _, answer in self.pairs()] or [np.zeros(0, np.int32)])
        counts = np.bincount(answers, minlength=vocab_size).astype(np.int64)
        counts[list(always)] = counts.sum() + 1
        order = np.lexsort((np.arange(vocab_size), -counts))
        return np.sort(order[:count]).astype(np.int32)


def load_documents(
    paths: Sequence[Path],
    *,
    vocab_size: int,
    shortest: int,
    longest: int,
    skip_short: bool = False,
    read: Mapping[str, Callable[[Path], list[Document]]] | None = None,
) -> Documents:
    """Reads files, and folders of them, in the order of their names.

    Args:
      read: readers of other kinds than `.npz`, see `kind`.
      shortest: tokens (prompt and answer) that a document needs: a block.
      longest: documents are cut to this many tokens.
      skip_short: leave out documents below `shortest` instead of refusing the file.

    Raises:
      DataError: nothing to read, a damaged or empty file, ids outside the vocabulary, a short document.
    """
    readers = read or {}
    tokens: list[np.ndarray] = []
    prompts: list[int] = []
    labelled: list[np.ndarray] = []
    whole = False
    for file in files(paths, (".npz", *readers)):
        reader = readers.get(kind(file))
        for number, (prompt, answer, *marks) in enumerate(reader(file) if reader else read_documents(file, vocab_size)):
            document = np.concatenate([prompt, answer]).astype(np.int32)[:longest]
            if shortest <= len(document) and len(prompt) + 1 < len(document):
                tokens.append(document)
                prompts.append(len(prompt))
                whole = whole or bool(marks)
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
    return Documents(tokens, np.asarray(prompts, np.int32), labelled if whole else None)


def kind(path: Path) -> str:
    """Returns a file's suffix; HUB for `NAME/NAME` or `NAME/NAME:SPLIT` that is no file on this machine."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(path)) and path.suffix not in FILES
    return HUB if is_name and not path.exists() else path.suffix


def files(paths: Sequence[Path], kinds: Sequence[str]) -> list[Path]:
    """Returns the named files, those of these kinds in named folders, and datasets of the Hub, if that is a kind.

    Raises:
      DataError: nothing is there.
    """
    every: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if file.suffix in kinds) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: no {' or '.join(name for name in kinds if name != HUB)} files in this folder")
        if not (path.is_dir() or path.is_file() or (HUB in kinds and kind(path) == HUB)):
            raise DataError(f"{path}: no such file or folder")
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
    try:
        prompts, answers = (_split(arrays, name, vocab_size) for name in PARTS)
        if len(prompts) != len(answers):
            raise ValueError(f"{len(prompts)} prompts, but {len(answers)} answers")
    except ValueError as error:
        raise DataError(f"{file}: {error}") from None
    return list(zip(prompts, answers))


def _split(arrays: Mapping[str, np.ndarray], name: str, vocab_size: int) -> list[np.ndarray]:
    """Returns the ids of each document's prompt or answer; ValueError: what is wrong with the arrays."""
    for key in (name, f"{name}_len"):
        if key not in arrays:
            raise ValueError(f"array {key!r} is missing (expected {', '.join(ARRAYS)})")
        if arrays[key].ndim != 1 or not np.issubdtype(arrays[key].dtype, np.integer):
            raise ValueError(
                f"array {key!r} must be one-dimensional integers, got {arrays[key].dtype} {arrays[key].shape}"
            )
    ids, lengths = arrays[name], arrays[f"{name}_len"].astype(np.int64)
    ends = np.cumsum(lengths)
    if not len(lengths):
        raise ValueError("no documents")
    if (lengths < 1).any():
        raise ValueError(f"document {int(np.argmax(lengths < 1))} has an empty {name}")
    if ends[-1] != len(ids):
        raise ValueError(f"{name}_len adds up to {ends[-1]}, but {name!r} has {len(ids)} ids")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        bad = int(np.argmax(outside))
        place = f"document {int(np.searchsorted(ends, bad, side='right'))}: token id {int(ids[bad])} in {name!r}"
        raise ValueError(f"{place} is outside the target's vocabulary of {vocab_size}")
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


class _Rows:
    """Padded documents by index, for Grain to shuffle and batch."""

    def __init__(self, documents: Documents, length: int):
        self.documents, self.length = documents, length

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.documents.tokens[index]
        return {
            "tokens": np.pad(tokens, (0, self.length - len(tokens))),
            "prompt_length": self.documents.prompt_length[index],
            "length": np.int32(len(tokens)),
            "document": np.int32(index),
        }


def batches(documents: Documents, *, length: int, batch: int, seed: int) -> Any:
    """Returns endless shuffled batches by step number, the same on every machine and run.

    Returns:
      A Grain dataset of dicts: tokens `[batch, length]`, prompt_length, length and document `[batch]`.
    """
    return shuffled(_Rows(documents, length), batch, seed)


def shuffled(rows: Any, batch: int, seed: int) -> Any:
    """Returns endless shuffled batches of rows (dicts of arrays by index), as a Grain dataset by step number."""
    import grain

    return grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(batch)
