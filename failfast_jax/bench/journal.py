"""The records of a run: one file of JSON lines, each written whole, from which a killed run goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from failfast_jax.bench.variants import BASELINE
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, NEAR_TIE, OTHER_SAMPLE

Record = dict[str, Any]
RUN, ANSWER, DIFFERENCE, PARTS, SCORE = "run", "answer", "difference", "parts", "score"
"""Kinds of lines: what was run, one answer, where an answer left `vanilla`'s, costs of a round's parts, one score."""

_KEYS = {
    ANSWER: ("dataset", "question", "repeat", "setting", "block"),
    DIFFERENCE: ("dataset", "question", "repeat", "setting"),
    PARTS: ("dataset", "setting"),
    SCORE: ("dataset", "question", "text"),
}


def key_of(kind: str, record: Record) -> tuple:
    """What a line is about. Only `vanilla` answers a question once per block of settings."""
    key = tuple(record[name] for name in _KEYS[kind])
    return key[:-1] if kind == ANSWER and record["setting"] != BASELINE else key


def read_lines(path: Path) -> tuple[list[Record], int]:
    """Records of a file, and how many lines at its end are cut off (0 or 1).

    Raises:
      ValueError: a line that is no record, before the last one.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            record["kind"]
        except (json.JSONDecodeError, KeyError, TypeError):
            if number != len(lines):
                raise ValueError(f"{path}: line {number} is no record; name another file or folder") from None
            return records, 1
        records.append(record)
    return records, 0


def differences(there: Record, here: Record, prefix: str = "") -> list[str]:
    """What two identities disagree on, with both values; a key that one side lacks is no disagreement."""
    found = []
    for key in sorted(there.keys() & here.keys()):
        one, other = there[key], here[key]
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, f"{prefix}{key} ")
        elif one != other:
            found.append(f"{prefix}{key}: {one!r} there, {other!r} here")
    return found


class Journal:
    """Records in order, on disk (or only in memory, with no path).

    A line that a kill cut off is dropped from the file, with a word on stderr; everything before it is kept.

    Args:
      path: the file; created with its first line.
      identity: what all records of a file must agree on; a key that one side lacks is no disagreement.
      machine: noted beside it.

    Raises:
      ValueError: the file is no journal, or was made with another identity; the message names what differs.
    """

    def __init__(self, path: Path | None, identity: Record, machine: Record | None = None):
        self.path = path
        self.lines: dict[str, dict[tuple, Record]] = {kind: {} for kind in _KEYS}
        self.session = 0
        if path is not None and path.exists():
            self._read(path, identity)
        self._head: Record | None = {
            "kind": RUN,
            "session": self.session,
            "identity": identity,
            "machine": machine,
        }

    def _read(self, path: Path, identity: Record) -> None:
        records, cut_off = read_lines(path)
        for record in records:
            if record["kind"] == RUN:
                self.session = record["session"] + 1
                other = differences(record["identity"], identity)
                if other:
                    raise ValueError(f"{path}: made with other settings ({'; '.join(other)}); name another --out")
            elif record["kind"] in self.lines:
                self.lines[record["kind"]][key_of(record["kind"], record)] = record
        if cut_off:
            number = len(records) + 1
            print(f"{path}: line {number} is cut off; what it held is done again", file=sys.stderr)
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
            temporary.replace(path)
        elif records:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                ended = file.read() == b"\n"
            if not ended:  # whole but for its line break
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")

    def append(self, record: Record) -> None:
        """Keeps a record; it is on disk when this returns."""
        head, self._head = self._head, None  # written with a session's first record
        if head is not None:
            self.append(head)
        if record["kind"] in self.lines:
            self.lines[record["kind"]][key_of(record["kind"], record)] = record
        if self.path is not None:
            # One write call: a kill leaves a line whole, absent, or (disk full) cut off at the end of the file.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, (json.dumps(record) + "\n").encode())
            finally:
                os.close(descriptor)

    @property
    def answers(self) -> dict[tuple, Record]:
        return self.lines[ANSWER]

    def baseline_of(self, record: Record) -> Record | None:
        """`vanilla`'s answer that was timed back to back with this one."""
        return self.answers.get((record["dataset"], record["question"], record["repeat"], BASELINE, record["block"]))

    def judged(self, near_tie: float, exact: bool) -> list[Record]:
        """All answers, those of other settings than `vanilla` with their `verdict`.

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
            where = self.lines[DIFFERENCE].get(key_of(DIFFERENCE, record))
            verdict = EQUAL
            if baseline["output_ids"] != record["output_ids"]:
                excused = where is not None and not exact and where["logit_gap"] < near_tie
                verdict = NEAR_TIE if excused else DIFFERENT if record["compared"] else OTHER_SAMPLE
            found = where or {"first_difference": None, "logit_gap": 0.0}
            out.append(
                {
                    **record,
                    "verdict": verdict,
                    "first_difference": found["first_difference"],
                    "logit_gap": found["logit_gap"],
                }
            )
        return out
