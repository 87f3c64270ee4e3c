"""Reading and writing files so that a kill at any moment leaves nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from failfast_jax import distributed
from failfast_jax.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, naming the file in every error."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a whole file or none of it: beside `path` first, then renamed over it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


Record = dict[str, Any]


def read_lines(path: Path) -> tuple[list[Record], bool]:
    """The objects of a file of JSON lines, and whether its last line is cut off (and left out).

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
    """Records of long work in a file of JSON lines, from which a killed run goes on.

    A line that a kill cut off is dropped, with a word on stderr; everything before it stays as it is, byte for byte.
    Each session that writes begins with a line `{"kind": "run", "session", "identity", "machine"}`.

    Args:
      path: the file, made with its first line; None keeps the records in memory only.
      identity: JSON-ready; what all sessions of a file must agree on (a key that one side lacks is no disagreement).
      machine: noted beside it.

    Attributes:
      records: what was appended, by this session and earlier ones, in order.
      session: number of this session.

    Raises:
      ConfigError: the file is no journal, or was made with another identity; the message names what differs.
    """

    RUN = "run"

    def __init__(self, path: Path | None, identity: Record, machine: Record | None = None) -> None:
        self.path = path
        self.records: list[Record] = []
        self.session = 0
        if not distributed.speaks():
            self.path = path = None
        if path is not None and path.exists():
            self._resume(path, identity)
        self.records, self.session = distributed.agreed([self.records, self.session])
        # Written with the session's first record: a session that adds nothing leaves no trace.
        self._head: Record | None = {
            "kind": self.RUN,
            "session": self.session,
            "identity": identity,
            "machine": machine,
        }

    def _resume(self, path: Path, identity: Record) -> None:
        records, cut_off = read_lines(path)
        if records and records[0].get("kind") != self.RUN:
            raise ConfigError(f"{path}: line 1 is no record of a run; name another file or folder")
        for record in records:
            if record.get("kind") != self.RUN:
                self.records.append(record)
                continue
            self.session = record["session"] + 1
            if other := differences(record["identity"], json.loads(json.dumps(identity))):
                raise ConfigError(f"{path}: made with other settings ({'; '.join(other)}); name another --out")
        content = path.read_bytes()
        if cut_off:
            print(f"{path}: line {len(records) + 1} is cut off; what it held is done again", file=sys.stderr)
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        elif content and not content.endswith(b"\n"):  # whole but for its line break
            write_atomically(path, content + b"\n")

    def append(self, record: Record) -> None:
        """Keeps a record; it is with the operating system when this returns."""
        head, self._head = self._head, None
        self.records.append(record)
        lines = [*([head] if head is not None else []), record]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write call: a kill leaves a line whole, absent, or (disk full) cut off at the end of the file.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, "".join(json.dumps(line) + "\n" for line in lines).encode())
            finally:
                os.close(descriptor)
