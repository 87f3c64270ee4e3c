"""Records of long work in files of JSON lines, from which a killed command continues."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError
from failfast_jax.util import processes
from failfast_jax.util.files import naming, write_all, write_atomically

Record = dict[str, Any]


def read_lines(path: Path) -> tuple[list[Record], bool]:
    """Reads a file of JSON lines; returns its objects, and True if its last line is cut off (and left out).

    Raises:
      ConfigError: a line before the last one is no JSON object.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            if number == len(lines):
                return records, True
            raise ConfigError(f"{path}: line {number} is no record; name another file or folder")
        records.append(record)
    return records, False


def append_lines(path: Path, records: list[Record]) -> None:
    """Adds records to a file of JSON lines: all of them, or none.

    Raises:
      OSError: the file cannot be written; the error names the file, whose earlier content stays.
    """
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with naming(path), path.open("ab", buffering=0) as file:
        # One call: a kill leaves a line whole, absent, or (power lost) cut off at the end of the file.
        size = os.fstat(file.fileno()).st_size
        try:
            write_all(file.fileno(), data)
        except OSError:
            file.truncate(size)
            raise


def differences(there: Record, here: Record, prefix: str = "") -> list[str]:
    """Lists the keys in which two identities differ, with both values; keys that one side lacks are ignored."""
    lines = []
    for key in sorted(there.keys() & here.keys()):
        value, other = there[key], here[key]
        if isinstance(value, dict) and isinstance(other, dict):
            lines += differences(value, other, f"{prefix}{key} ")
        elif value != other:
            lines.append(f"{prefix}{key}: {value!r} there, {other!r} here")
    return lines


class Journal:
    """Records of long work in a file of JSON lines, from which a killed run continues.

    A line that a kill cut off is dropped, with a note on stderr; everything before it stays, byte for byte. Each
    session that writes begins with a line `{"kind": "run", "session", "identity", "machine"}`.

    Args:
      path: the file, created with its first record; None keeps the records in memory only.
      identity: JSON-ready settings that all sessions of a file must share; see `differences`.
      machine: recorded beside the identity; sessions may differ in it.

    Attributes:
      records: the records of this session and earlier ones, in order.
      session: number of this session.

    Raises:
      ConfigError: the file is no journal, or has another identity; the message names the differences.
    """

    RUN = "run"

    def __init__(self, path: Path | None, identity: Record, machine: Record | None = None) -> None:
        self.path = path if processes.is_primary() else None
        self.records: list[Record] = []
        self.session = 0
        if self.path is not None and self.path.exists():
            self._resume(self.path, identity)
        self.records, self.session = processes.broadcast_from_primary([self.records, self.session])
        # Written with the first record: a session without records leaves no trace.
        self._head = [{"kind": self.RUN, "session": self.session, "identity": identity, "machine": machine}]

    def _resume(self, path: Path, identity: Record) -> None:
        records, cut_off = read_lines(path)
        if records and records[0].get("kind") != self.RUN:
            raise ConfigError(f"{path}: line 1 is no record of a run; name another file or folder")
        for record in records:
            if record.get("kind") != self.RUN:
                self.records.append(record)
                continue
            there, session = record.get("identity"), record.get("session")
            if not isinstance(there, dict) or not isinstance(session, int):
                raise ConfigError(f"{path}: a line of kind {self.RUN} has no identity and session; it was changed")
            self.session = session + 1
            if other := differences(there, json.loads(json.dumps(identity))):
                raise ConfigError(f"{path}: made with other settings ({'; '.join(other)}); name another --out")
        content = path.read_bytes()
        if cut_off:
            print(f"{path}: line {len(records) + 1} is cut off; its work is done again", file=sys.stderr)
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        elif content and not content.endswith(b"\n"):  # whole but for its line break
            write_atomically(path, content + b"\n")

    def append(self, record: Record) -> None:
        """Adds a record, and returns once the operating system has it.

        Raises:
          OSError: the file cannot be written; its earlier content stays.
        """
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self.path, [*self._head, record])
        self._head = []
        self.records.append(record)
