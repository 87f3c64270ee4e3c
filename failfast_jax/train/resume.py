"""Folders that know the settings of their command, so that it may be ended at any moment and started again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from failfast_jax.errors import OptionError
from failfast_jax.options import require
from failfast_jax.util import processes
from failfast_jax.util.files import read_json, write_json
from failfast_jax.util.records import differences


def is_begun(
    file: Path, settings: dict[str, Any], *, foreign: str | None = None, grows: str | None = None, flag: str = "--out"
) -> bool:
    """Returns true if the folder of a settings file was begun with these settings, false if it is new.

    Args:
      foreign: files of this pattern, in a folder without settings, belong to something else.
      grows: a setting, a number, that may be larger than before.
      flag: of the folder, for messages.

    Raises:
      OptionError: the folder was begun with other settings, is no folder, or belongs to something else.
    """
    folder = file.parent
    require(folder.is_dir() or not folder.exists(), f"{flag} {folder}", "not a folder")
    if not file.exists():
        # A killed start may have left a part of its settings.
        strange = foreign and any(path.name != f"{file.name}.part" for path in folder.glob(foreign))
        require(not strange, f"{flag} {folder}", f"not empty, and no {file.name} in it; name another folder")
        return False
    there = read_json(file)
    if grows in there:
        there[grows] = max(there[grows], settings[grows])
    others = differences(there, json.loads(json.dumps(settings)))
    problem = f"was begun with other settings ({'; '.join(others)}); name another folder"
    require(not others, f"{flag} {folder}", problem)
    return True


def begin(file: Path, settings: dict[str, Any], **rules: Any) -> bool:
    """Checks as `is_begun`; creates a new folder with its settings, and says what has grown in an old one."""
    begun, grows = is_begun(file, settings, **rules), rules.get("grows")
    there = read_json(file) if begun else {}
    if begun and (grows is None or there[grows] == settings[grows]):
        return True
    if begun:
        print(f"{file.parent}: {grows} {there[grows]} before, {settings[grows]} now: it goes on", file=sys.stderr)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, there | settings)
    return begun


def check_same(settings: dict[str, Any]) -> None:
    """Raises OptionError: the processes have different settings or documents."""
    mine = json.loads(json.dumps(settings))
    other = differences(processes.broadcast_from_primary(mine), mine)
    if unlike := processes.where_false(not other):
        named = f" ({'; '.join(other)})" if other else ""
        raise OptionError(
            f"process {unlike[0]} has other options or documents than process 0{named}; give all the same"
        )
