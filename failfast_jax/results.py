"""What a request returns: the answer, the rounds that it took, counts and times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one sequence."""

    drafted: list[int]
    """Ids that were proposed."""
    confidence: list[float]
    """Of each, in [0, 1]: the drafter's probability of it."""
    accepted: int
    """Leading drafted tokens that the target agreed with, before any cut at a stop token or at the limit."""
    emitted: list[int]
    """Ids that became text: accepted ones and one of the target's own."""
    passes: int
    """Forward passes of the drafter."""
    adopted: int | None = None
    """Of `dllm --spiffy`: passes of the block that were not made, because a draft state's served."""
    tree: dict[str, list[int]] | None = None
    """What was verified, if that was a tree: `tokens` of its nodes, and of each its `parent` (-1: the last token before
    the round). `drafted` is then its longest path, with the accepted one over its beginning."""
    expected: float | None = None
    """Of `auto`: tokens that the round was expected to emit."""
    seconds: float | None = None
    """Likewise how long, in seconds, the whole batch was expected to take for it."""
    took: float | None = None
    """Seconds that the round took, where rounds were timed one by one (`--trace`)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without keys of what there is not."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's softmax as it is: temperature 1, no filters."""

    logprob: float
    best: list[tuple[int, float]]
    """The most probable tokens at its place, best first, with theirs."""
    offset: int | None = None
    """Characters of the answer's text before it; None where there is no text."""


@dataclasses.dataclass(frozen=True)
class RowLog:
    """The rounds of one row, and its forward passes; prefill not counted, but for `dllm`."""

    rounds: list[Round]
    drafter_passes: int
    target_passes: int

    def timed(self, took: Sequence[float]) -> RowLog:
        """With the times of the batch's rounds, in seconds; a row runs from the first of these on."""
        rounds = [dataclasses.replace(entry, took=seconds) for entry, seconds in zip(self.rounds, took)]
        return dataclasses.replace(self, rounds=rounds)

    @property
    def adopted_passes(self) -> int | None:
        """Of `dllm` with draft states."""
        found = [entry.adopted for entry in self.rounds if entry.adopted is not None]
        return sum(found) if found else None


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of one answer. Times are in seconds and, in a batch, those of the whole batch.

    Attributes:
      rounds: draft, verify, commit, so many times (of `dllm`: blocks).
      drafted: tokens.
      accepted: tokens of these that the target agreed with.
      drafter_passes: forward passes, prefill not counted.
      target_passes: likewise (of `dllm`: all of them).
      load_s: of the engine.
      compile_s: waited for programs, beside prefill.
      prefill_s: of the prompt.
      decode_s: of all rounds.
      tokens_per_s: emitted tokens over `decode_s`.
      compiles: programs that XLA compiled for this answer.
      cache_hits: programs that were read from the compile cache for it.
      host_syncs: waits of the host for the device.
    """

    rounds: int
    drafted: int
    accepted: int
    drafter_passes: int
    target_passes: int
    load_s: float
    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    compiles: int
    cache_hits: int
    host_syncs: int
    adopted_passes: int | None = None
    """Of `dllm --spiffy`: passes that were not made, because a draft state's served; with `target_passes`, as many as
    without it."""
    costs: dict[str, Any] | None = None
    """Of `auto`: seconds of a round by rows verified (`verify`), of a drafter pass (`draft`), and where the
    figures come from (`source`)."""

    @classmethod
    def of(cls, log: RowLog, **measured: Any) -> Stats:
        """The counts of a log, and what was measured beside them: all other fields."""
        return cls(
            rounds=len(log.rounds),
            drafted=sum(len(entry.drafted) for entry in log.rounds),
            accepted=sum(entry.accepted for entry in log.rounds),
            drafter_passes=log.drafter_passes,
            target_passes=log.target_passes,
            adopted_passes=log.adopted_passes,
            **measured,
        )


def fate(rounds: int, drafted: int, accepted: int) -> str:
    """What became of drafts, in the words of every command and page."""
    return f"{rounds} rounds, {accepted} of {drafted} drafted tokens accepted ({accepted / max(rounds, 1):.2f} a round)"


@dataclasses.dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
      prompt_ids: what was answered, its chat template included.
      output_ids: the answer; a stop token at its end is part of it.
      text: the answer without special tokens; None without a tokenizer.
      finish_reason: `eos` or `length`.
      method: a key of `drafters.METHODS`, or `dllm`.
      stats: counts and times.
      rounds: how it came about, in order.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    method: str
    stats: Stats
    rounds: list[Round]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: what `--json` prints."""
        found = {**dataclasses.asdict(self), "rounds": [entry.to_dict() for entry in self.rounds]}
        for name in ("adopted_passes", "costs"):
            if found["stats"][name] is None:
                del found["stats"][name]
        return found


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """News about one sequence of a streamed request."""

    sequence: int
    """Which prompt, from 0."""
    ids: list[int]
    """Tokens that became final since the last event."""
    text: str | None
    """Text that became final since the last event; None without a tokenizer."""
    result: Result | None = None
    """Set in the sequence's last event."""
