"""Records of long work in files of JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError
from failfast_jax.util.files import naming, write_all

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
