"""Counts of the authors' released code, from our records.

It counts drafter passes otherwise: the first prefill of the prompt is one, and so is each later one. It prefills again
whenever the committed text has grown into another block, as what it kept is told apart by its length alone, and after
each draft that crossed a block's end, whose storing pass takes the place of what was kept. (Ours keeps the blocks that
were accepted, and stores others one by one.) Lengths are those asked for: a draft that a stop token cut short counts in
full. Accepted tokens count beyond the answer's end, unless `within_answer`; tokens are accepted ones and one a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from failfast_jax.util.records import Record


class ReleasedRounds(NamedTuple):
    """The rounds of an answer: accepted and speculated tokens, and drafter passes, of each."""

    accepted: tuple[int, ...]
    speculated: tuple[int, ...]
    passes: tuple[int, ...]


def released_rounds(record: Record, within_answer: bool = False) -> ReleasedRounds:
    """Counts an answer's rounds as the released code does; `within_answer`: without accepted tokens past its end."""
    kind, speculated = record["drafter"]["kind"], tuple(lengths_asked_for(record))
    if kind == "ar":
        passes = speculated
    elif kind == "other":
        passes = tuple(entry["passes"] for entry in record["detail"])
    else:
        passes = tuple(map(sum, aligned_passes(record)))
    accepted = (
        min(entry["accepted"], entry["emitted"]) if within_answer else entry["accepted"] for entry in record["detail"]
    )
    return ReleasedRounds(tuple(accepted), speculated, passes)


def lengths_asked_for(record: Record) -> Iterator[int]:
    """Yields the lengths of drafts before a stop token cut them: multiples of the chunk, or the fixed length."""
    drafter = record["drafter"]
    uncut = drafter["kind"] == "other" or (drafter["kind"] == "ar" and drafter["grows"])
    for entry, fresh in zip(record["detail"], fresh_lengths(record)):
        drafted = entry["drafted"]
        if uncut or fresh < drafted:
            yield drafted
        else:
            chunk = drafter["spec_len"]
            yield max(-(-drafted // chunk), 1) * chunk if drafter["grows"] else chunk


def aligned_passes(record: Record) -> Iterator[tuple[int, int]]:
    """Yields for each round of an `aligned` drafter the passes that make the draft, and prefills (0 or 1)."""
    block, shift = record["drafter"]["block"], record["drafter"]["shift"]
    length, cached, kept = record["prompt_tokens"], None, None
    for entry, fresh in zip(record["detail"], fresh_lengths(record)):
        begun = length // block
        # Blocks that ours stores first. What the prompt lacks belongs to the prefill and is not counted.
        stored = 0 if cached is None else begun - cached
        crossed = max((length + fresh - 1) // block - begun, 0)
        prefill = int(length > block and kept != begun * block)
        kept = block if crossed else begun * block if length > block else None
        yield entry["passes"] - stored, prefill
        agreed = (length + min(entry["accepted"], entry["emitted"])) // block
        length += entry["emitted"]
        cached = min(begun + crossed, agreed, (length - shift) // block)


def fresh_lengths(record: Record) -> Iterator[int]:
    """Yields the number of tokens of each draft that a pass made: without those that were reused."""
    chunk, rejected = record["drafter"].get("spec_len"), []
    for entry in record["detail"]:
        ids = entry["ids"]
        sizes = range(chunk, len(ids), chunk) if record["options"].get("reuse") else ()
        yield next((size for size in sizes if ids[size:] == tail_after(ids[:size], rejected)), len(ids))
        rejected = ids[entry["accepted"] + 1 :]


def tail_after(draft: Sequence[int], rejected: Sequence[int]) -> list[int]:
    """Returns the tokens after the first place in `rejected` of the draft's longest end, of two tokens or more."""
    for size in range(len(draft), 1, -1):
        for at in range(len(rejected) - size + 1):
            if list(rejected[at : at + size]) == list(draft[-size:]):
                return list(rejected[at + size :])
    return []
