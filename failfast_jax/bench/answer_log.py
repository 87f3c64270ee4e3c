"""Records of a comparison: answers, differences from `vanilla` and scores, and the answers as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from failfast_jax.bench.rows import BASELINE
from failfast_jax.errors import ConfigError
from failfast_jax.results import Result
from failfast_jax.util import processes
from failfast_jax.util.files import write_atomically
from failfast_jax.util.records import Record, append_lines, differences, read_lines

RECORDS = "records.jsonl"
RUN, ANSWER, DIFFERENCE, SCORE = "run", "answer", "difference", "score"
"""Kinds of records: the begin of a session, an answer, the place where one leaves `vanilla`'s, a score of a text."""
EQUAL, NEAR_TIE, DIFFERENT = VERDICTS = ("equal", "near-tie", "different")
OTHER_SAMPLE = "other sample"
"""Verdict on rows that promise `vanilla`'s distribution, not its tokens."""
KEYS = {
    ANSWER: ("dataset", "question", "repeat", "setting", "block"),
    DIFFERENCE: ("dataset", "question", "repeat", "setting"),
    SCORE: ("dataset", "question", "text"),
}


def key_of(kind: str, record: Record) -> tuple:
    """Returns the fields that name a record's subject. Only `vanilla` answers a question once per block of rows."""
    key = tuple(record[name] for name in KEYS[kind])
    return key[:-1] if kind == ANSWER and record["setting"] != BASELINE else key


def to_record(result: Result, batch: int = 1) -> Record:
    """Returns the record of an answer: enough for every table and figure.

    Rounds of `vanilla` are one token each and are left out. An answer of a batch has an equal share of its time.
    """
    counts = ("rounds", "drafted", "accepted", "drafter_passes", "target_passes")
    detail = [
        {
            "drafted": len(entry.drafted),
            "ids": entry.drafted,
            "accepted": entry.accepted,
            "emitted": len(entry.emitted),
            "passes": entry.passes,
            # Rounded: float32 has no tenths, and 0.7 belongs to the bin that starts there.
            "confidence": [round(value, 6) for value in entry.confidence],
            **({"nodes": len(entry.tree["tokens"])} if entry.tree else {}),
        }
        for entry in result.rounds
    ]
    return {
        "method": result.method,
        **{name: getattr(result.stats, name) / batch for name in ("decode_s", "prefill_s")},
        **{name: getattr(result.stats, name) for name in counts},
        "prompt_tokens": len(result.prompt_ids),
        "prompt_ids": result.prompt_ids,
        "tokens": len(result.output_ids),
        "finish_reason": result.finish_reason,
        "output_ids": result.output_ids,
        "detail": [] if result.method == BASELINE else detail,
    }


class AnswerLog:
    """The records of a run in a file of JSON lines, from which a killed run continues.

    A line that a kill cut off is dropped, with a note on stderr; everything before it stays, byte for byte. Each
    session that writes begins with a line `{"kind": "run", "session", "identity", "machine"}`.

    Args:
      path: the file, created with its first record; None keeps the records in memory only.
      identity: JSON-ready settings that all sessions of a file must share; see `differences`.
      machine: recorded beside the identity; sessions may differ in it.

    Attributes:
      answers, differences, scores: records by `key_of`, the newest of a key, of this session and earlier ones.
      session: number of this session.

    Raises:
      ConfigError: the file is no log of a run, or has another identity; the message names the differences.
    """

    def __init__(self, path: Path | None = None, identity: Record | None = None, machine: Record | None = None) -> None:
        self.path, self.session = path if processes.is_primary() else None, 0
        self.by_kind: dict[str, dict[tuple, Record]] = {kind: {} for kind in KEYS}
        self.answers, self.differences, self.scores = self.by_kind.values()
        records = self._resume(identity or {}) if self.path is not None and self.path.exists() else []
        records, self.session = processes.broadcast_from_primary([records, self.session])
        for record in records:
            try:
                self._keep(record)
            except (KeyError, TypeError):
                keys = ", ".join(KEYS[record["kind"]])
                raise ConfigError(f"{path}: a line of kind {record['kind']} lacks {keys}; it was changed") from None
        # Written with the first record: a session without records leaves no trace.
        self._head = [{"kind": RUN, "session": self.session, "identity": identity or {}, "machine": machine}]

    def _resume(self, identity: Record) -> list[Record]:
        """Returns the file's records, without the lines that begin a session."""
        path, kept = self.path, []
        records, cut_off = read_lines(path)
        if records and records[0].get("kind") != RUN:
            raise ConfigError(f"{path}: line 1 is no record of a run; name another file or folder")
        for record in records:
            if record.get("kind") != RUN:
                kept.append(record)
                continue
            there, session = record.get("identity"), record.get("session")
            if not isinstance(there, dict) or not isinstance(session, int):
                raise ConfigError(f"{path}: a line of kind {RUN} has no identity and session; it was changed")
            self.session = session + 1
            if other := differences(there, json.loads(json.dumps(identity))):
                raise ConfigError(f"{path}: made with other settings ({'; '.join(other)}); name another --out")
        content = path.read_bytes()
        if cut_off:
            print(f"{path}: line {len(records) + 1} is cut off; its work is done again", file=sys.stderr)
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        elif content and not content.endswith(b"\n"):  # whole but for its line break
            write_atomically(path, content + b"\n")
        return kept

    @classmethod
    def of(cls, records: Iterable[Record]) -> AnswerLog:
        """Returns a log in memory."""
        log = cls()
        for record in records:
            log.append(record)
        return log

    @classmethod
    def read(cls, folder: Path) -> AnswerLog:
        """Returns the records of a run's folder, to look at.

        Raises:
          ValueError, OSError: there are none.
        """
        log = cls.of(read_lines(folder / RECORDS)[0])
        if not log.answers:
            raise ValueError(f"{folder / RECORDS}: holds no answers")
        return log

    def _keep(self, record: Record) -> None:
        if str(record.get("kind")) in self.by_kind:
            self.by_kind[record["kind"]][key_of(record["kind"], record)] = record

    def append(self, record: Record) -> None:
        """Adds a record, and returns once the operating system has it.

        Raises:
          OSError: the file cannot be written; its earlier content stays.
        """
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self.path, [*self._head, record])
        self._head = []
        self._keep(record)

    def baseline_of(self, record: Record) -> Record | None:
        """Returns `vanilla`'s answer that was timed back to back with this one."""
        return self.answers.get((record["dataset"], record["question"], record["repeat"], BASELINE, record["block"]))

    def verdict(self, record: Record, near_tie: float) -> str:
        """Compares an answer with `vanilla`'s beside it.

        Args:
          near_tie: gap of the target's two best logits below which a difference is excused.
        """
        baseline, difference = self.baseline_of(record), self.differences.get(key_of(DIFFERENCE, record))
        if baseline is None or baseline["output_ids"] == record["output_ids"]:
            return EQUAL
        if difference is not None and difference["logit_gap"] < near_tie:
            return NEAR_TIE
        return DIFFERENT if record.get("compared", True) else OTHER_SAMPLE

    def frame(self, near_tie: float = 0.0) -> pd.DataFrame:
        """Returns the answers that were timed beside `vanilla`'s, one a line.

        A killed run's last turn may lack `vanilla`'s answer. Added to the records' fields are `vanilla_s`, `verdict`
        (see there for the argument) and, from the rounds: `accepted`, the drafted tokens that became output (a last
        draft may agree beyond the answer's end), `verified`, rows of all verifies, `max_accepted` and `max_drafted`.
        """
        lines = []
        for record in self.answers.values():
            if (baseline := self.baseline_of(record)) is None:
                continue
            rounds = record["detail"]
            accepted = [min(entry["accepted"], entry["emitted"]) for entry in rounds]
            line = {
                "vanilla_s": baseline["decode_s"],
                "verdict": self.verdict(record, near_tie),
                "accepted": sum(accepted),
                "verified": sum(entry.get("nodes", entry["drafted"]) for entry in rounds) + record["rounds"],
                "max_accepted": max(accepted, default=np.nan),
                "max_drafted": max((entry["drafted"] for entry in rounds), default=np.nan),
            }
            lines.append(record | line)
        return pd.DataFrame(lines)


def rounds_of(answers: pd.DataFrame) -> pd.DataFrame:
    """Returns the rounds of answers that drafted anything, one a line: `dataset`, `setting`, and the round's fields.

    `accepted` is all that the target agreed with, beyond an answer's end, too.
    """
    detail = answers[["dataset", "setting", "detail"]].explode("detail").dropna(subset="detail").reset_index(drop=True)
    fields = pd.DataFrame(
        detail.pop("detail").tolist(), columns=["drafted", "accepted", "emitted", "passes", "confidence"]
    )
    rounds = detail.join(fields)
    return rounds[rounds.drafted > 0]
