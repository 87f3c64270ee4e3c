"""The records of a benchmark, found again by what they are about."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from failfast_jax.bench.rows import BASELINE
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, NEAR_TIE, OTHER_SAMPLE
from failfast_jax.errors import ConfigError
from failfast_jax.results import Result, Round, Stats
from failfast_jax.util import records
from failfast_jax.util.records import Record

RECORDS = "records.jsonl"
ANSWER, DIFFERENCE, SCORE = "answer", "difference", "score"
"""Kinds of records: an answer, the place where one left `vanilla`'s, a score."""

_KEYS = {
    ANSWER: ("dataset", "question", "repeat", "setting", "block"),
    DIFFERENCE: ("dataset", "question", "repeat", "setting"),
    SCORE: ("dataset", "question", "text"),
}


def key_of(kind: str, record: Record) -> tuple:
    """What a record is about. Only `vanilla` answers a question once per block of variants."""
    key = tuple(record[name] for name in _KEYS[kind])
    return key[:-1] if kind == ANSWER and record["setting"] != BASELINE else key


def result_of(record: Record) -> Result:
    """An answer as it was returned, without its text, from its record.

    Raises:
      ValueError: it was recorded without the drafted tokens.
    """
    rounds, at = [], 0
    ids = record["output_ids"]
    for entry in record["detail"]:
        if "ids" not in entry:
            raise ValueError(f"{record['setting']}, question {record['question']}: recorded without drafted ids")
        emitted = ids[at : at + entry["emitted"]]
        rounds.append(Round(entry["ids"], entry["confidence"], entry["accepted"], emitted, entry["passes"]))
        at += len(emitted)
    rounds += [Round([], [], 0, [token], 0) for token in ids[at:]]  # of `vanilla`
    kept = {name: record.get(name, 0) for name in (field.name for field in dataclasses.fields(Stats))}
    speed = len(ids) / record["decode_s"] if record.get("decode_s") else 0.0
    stats = Stats(**{**kept, "rounds": len(rounds), "costs": None, "tokens_per_s": speed})
    return Result([], ids, None, record["finish_reason"], record["setting"], stats, rounds)


class Journal(records.Journal):
    """A journal whose records are also kept by kind and `key_of`, the newest of a key.

    Attributes:
      lines: per kind, records by key.
    """

    def __init__(self, path: Path | None, identity: Record, machine: Record | None = None) -> None:
        super().__init__(path, identity, machine)
        self.lines: dict[str, dict[tuple, Record]] = {kind: {} for kind in _KEYS}
        for record in self.records:
            try:
                self._keep(record)
            except (KeyError, TypeError):
                keys = ", ".join(_KEYS[record["kind"]])
                raise ConfigError(f"{path}: a line of kind {record['kind']} lacks {keys}; it was changed") from None

    def _keep(self, record: Record) -> None:
        if str(record.get("kind")) in self.lines:
            self.lines[record["kind"]][key_of(record["kind"], record)] = record

    def append(self, record: Record) -> None:
        super().append(record)
        self._keep(record)

    @property
    def answers(self) -> dict[tuple, Record]:
        """Recorded answers by their keys."""
        return self.lines[ANSWER]

    def baseline_of(self, record: Record) -> Record | None:
        """`vanilla`'s answer that was timed back to back with this one."""
        return self.answers.get((record["dataset"], record["question"], record["repeat"], BASELINE, record["block"]))

    def judged(self, near_tie: float, exact: bool) -> list[Record]:
        """All answers, those of other variants than `vanilla` with their `verdict`.

        Args:
          near_tie: gap of the target's two best logits below which a difference is excused.
          exact: nothing is excused.
        """
        out = []
        for record in self.answers.values():
            baseline = self.baseline_of(record)
            if record["setting"] == BASELINE or baseline is None:
                out.append(record)
                continue
            noted = self.lines[DIFFERENCE].get(key_of(DIFFERENCE, record))
            if baseline["output_ids"] == record["output_ids"]:
                verdict = EQUAL
            elif noted is not None and not exact and noted["logit_gap"] < near_tie:
                verdict = NEAR_TIE
            else:
                verdict = DIFFERENT if record["compared"] else OTHER_SAMPLE
            out.append({**record, "verdict": verdict})
        return out
