"""Records of long work: files of JSON lines, folders that know their settings, and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.options import require
from failfast_jax.util import processes
from failfast_jax.util.files import naming, read_json, write_all, write_json

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


def begin(
    file: Path,
    settings: dict[str, Any],
    *,
    create: bool = True,
    foreign: str | None = None,
    grows: str | None = None,
    flag: str = "--out",
) -> bool:
    """Returns true if the folder of a settings file was begun with these settings; else begins it with them.

    Args:
      create: False: an absent folder stays absent, and nothing is written.
      foreign: files of this pattern, in a folder without settings, belong to something else.
      grows: a setting, a number, that may be larger than before: the larger one is stored, and reported.
      flag: flag that names the folder, for messages.

    Raises:
      OptionError: the folder was begun with other settings, is no folder, or belongs to something else.
    """
    folder, begun = file.parent, file.exists()
    require(folder.is_dir() or not folder.exists(), f"{flag} {folder}", "not a folder")
    there = read_json(file) if begun else {}
    if begun:
        grown = {grows: max(there[grows], settings[grows])} if grows in there else {}
        others = differences(there | grown, json.loads(json.dumps(settings)))
        problem = f"was begun with other settings ({'; '.join(others)}); name another folder"
        require(not others, f"{flag} {folder}", problem)
    else:
        # A killed start may have left a part of its settings.
        strange = foreign and any(path.name != f"{file.name}.part" for path in folder.glob(foreign))
        require(not strange, f"{flag} {folder}", f"not empty, and no {file.name} in it; name another folder")
    if not create or (begun and there.get(grows) == settings.get(grows)):
        return begun
    if begun:
        print(f"{folder}: {grows} {there[grows]} before, {settings[grows]} now: it goes on", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, there | settings)
    return begun


def check_same(settings: dict[str, Any]) -> None:
    """Raises OptionError: the processes have different settings or documents."""
    mine = json.loads(json.dumps(settings))
    other = differences(processes.broadcast_from_primary(mine), mine)
    if unlike := processes.where_false(not other):
        named = f" ({'; '.join(other)})" if other else ""
        raise OptionError(f"process {unlike[0]} has other options or documents than process 0{named}; make them equal")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows below a head; cells are shown as `str` shows them."""
    first, *others = [f"| {' | '.join(map(str, line))} |" for line in [head, *rows]]
    return "\n".join([first, "|" + "-|" * len(head), *others])
