"""Results of a request: the answer, its rounds, counts and times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one sequence."""

    drafted: list[int]
    """Proposed ids."""
    confidence: list[float]
    """The drafter's probability of each, in [0, 1]."""
    accepted: int
    """Leading drafted tokens that the target agreed with, before any cut at a stop token or at the limit."""
    emitted: list[int]
    """Ids that became text: the accepted ones and the target's next one, up to a stop token or the limit."""
    passes: int
    """Forward passes of the drafter."""
    adopted: int | None = None
    """With `dllm --spiffy`: passes of the block that draft states replaced."""
    tree: dict[str, list[int]] | None = None
    """The verified tree, if any: `tokens` and `parent` of its nodes (-1: the last token before the round). Its
    accepted nodes, then the rest of the longest path, are in `drafted`."""
    expected: float | None = None
    """With `auto`: expected tokens of the round."""
    seconds: float | None = None
    """Expected seconds of the round, for the whole batch (`auto`)."""
    took: float | None = None
    """Measured seconds of the round (`--trace`)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without keys of absent values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's softmax as it is: temperature 1, no filters."""

    logprob: float
    best: list[tuple[int, float]]
    """The most probable tokens at this position with their log-probabilities, best first."""


@dataclasses.dataclass(frozen=True)
class RowLog:
    """The rounds of one row, and its forward passes; prefill not counted, but for `dllm`."""

    rounds: list[Round]
    drafter_passes: int
    target_passes: int
    widths: list[int] | None = None
    """Positions that each round verified, if its drafter chose them by costs."""

    def timed(self, took: Sequence[float]) -> RowLog:
        """Returns a copy with measured seconds; a row's rounds are the first ones of the batch."""
        rounds = [dataclasses.replace(entry, took=seconds) for entry, seconds in zip(self.rounds, took)]
        return dataclasses.replace(self, rounds=rounds)

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return sum(len(entry.drafted) for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that the target accepted."""
        return sum(entry.accepted for entry in self.rounds)

    @property
    def adopted_passes(self) -> int | None:
        """Passes that draft states replaced; None without draft states."""
        adopted = [entry.adopted for entry in self.rounds if entry.adopted is not None]
        return sum(adopted) if adopted else None


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of one answer. Times are in seconds and, in a batch, those of the whole batch.

    Attributes:
      rounds: rounds of draft, verify, commit (with `dllm`: blocks).
      drafted: drafted tokens.
      accepted: drafted tokens that the target agreed with.
      drafter_passes: forward passes of the drafter without prefill.
      target_passes: forward passes of the target without prefill (with `dllm`: all of them).
      load_s: seconds of loading the engine.
      compile_s: seconds of waiting for programs, without prefill.
      prefill_s: seconds of the prompt's prefill.
      decode_s: seconds of all rounds.
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
    """With `dllm --spiffy`: passes that draft states replaced; added to `target_passes`, the passes without it."""
    parameter_bytes: dict[str, int] | None = None
    """Of `target` and `drafter`, as they run: see `quantization.parameter_bytes`."""
    costs: dict[str, Any] | None = None
    """With `auto`: seconds of a round by verified rows (`verify`), of a drafter pass (`draft`), and their `source`."""

    @classmethod
    def of(cls, log: RowLog, **measured: Any) -> Stats:
        """Counts of a log, with measured values for all other fields."""
        counted = ("drafted", "accepted", "drafter_passes", "target_passes", "adopted_passes")
        return cls(rounds=len(log.rounds), **{name: getattr(log, name) for name in counted}, **measured)


def acceptance_summary(rounds: int, drafted: int, accepted: int) -> str:
    """Summarises rounds, drafted and accepted tokens in a line, the same in every command."""
    return f"{rounds} rounds, {accepted} of {drafted} drafted tokens accepted ({accepted / max(rounds, 1):.2f} a round)"


@dataclasses.dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
      prompt_ids: the prompt, its chat template included.
      output_ids: the answer; a stop token at its end is part of it.
      text: the answer without special tokens; None without a tokenizer.
      finish_reason: `eos` or `length`.
      method: a key of `drafters.METHODS`, or `dllm`.
      stats: counts and times.
      rounds: the rounds, in order.
      arithmetic: forms of the target's matrices and of what they are multiplied by, see `quantization.arithmetic`.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    method: str
    stats: Stats
    rounds: list[Round]
    arithmetic: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: what `--json` prints."""
        fields = {**dataclasses.asdict(self), "rounds": [entry.to_dict() for entry in self.rounds]}
        return fields | {"stats": {name: value for name, value in fields["stats"].items() if value is not None}}


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """New tokens and text of one sequence of a streamed request."""

    sequence: int
    """Index of the prompt, from 0."""
    ids: list[int]
    """Tokens that became final since the last event."""
    text: str | None
    """Text that became final since the last event; None without a tokenizer."""
    result: Result | None = None
    """Set in the sequence's last event."""
