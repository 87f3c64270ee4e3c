"""Folders that know the settings of their command, so that it may be ended at any moment and started again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from failfast_jax.errors import OptionError
from failfast_jax.options import require
from failfast_jax.util import processes
from failfast_jax.util.files import read_json, write_json
from failfast_jax.util.records import differences

LENGTHENED = "lengthened"
"""Key of a settings file: earlier values of settings that have grown."""


def is_begun(file: Path, settings: dict[str, Any], foreign: str | None = None, may_grow: Sequence[str] = ()) -> bool:
    """Returns true if the folder of a settings file was begun with these settings, false if it is new.

    Args:
      foreign: files of this pattern, in a folder without settings, belong to something else.
      may_grow: settings, numbers, that may be larger than before.

    Raises:
      OptionError: the folder was begun with other settings, is no folder, or belongs to something else.
    """
    folder = file.parent
    require(folder.is_dir() or not folder.exists(), f"--out {folder}", "not a folder")
    if not file.exists():
        # A killed start may have left a part of its settings.
        strange = foreign and any(path.name != f"{file.name}.part" for path in folder.glob(foreign))
        require(not strange, f"--out {folder}", f"not empty, and no {file.name} in it; name another folder")
        return False
    there = read_json(file)
    others = differences(there | _grown(there, settings, may_grow), json.loads(json.dumps(settings)))
    problem = f"was begun with other settings ({'; '.join(others)}); name another folder"
    require(not others, f"--out {folder}", problem)
    return True


def _grown(there: dict[str, Any], settings: dict[str, Any], may_grow: Sequence[str]) -> dict[str, Any]:
    return {name: settings[name] for name in may_grow if settings[name] > there.get(name, settings[name])}


def begin(file: Path, settings: dict[str, Any], foreign: str | None = None, may_grow: Sequence[str] = ()) -> bool:
    """Checks as `is_begun`; creates a new folder with its settings, and notes those that have grown in an old one."""
    if not is_begun(file, settings, foreign, may_grow):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return False
    there = read_json(file)
    if grown := _grown(there, settings, may_grow):
        before = {name: there[name] for name in grown}
        for name, value in grown.items():
            print(f"{file.parent}: {name} {before[name]} before, {value} now: it goes on", file=sys.stderr)
        write_json(file, there | grown | {LENGTHENED: [*there.get(LENGTHENED, []), before]})
    return True


def check_same(settings: dict[str, Any]) -> None:
    """Raises OptionError: the processes have different settings or documents."""
    mine = json.loads(json.dumps(settings))
    other = differences(processes.broadcast_from_primary(mine), mine)
    if unlike := processes.where_false(not other):
        named = f" ({'; '.join(other)})" if other else ""
        raise OptionError(
            f"process {unlike[0]} has other options or documents than process 0{named}; give all the same"
        )
