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
        raise OptionError(
            f"process {unlike[0]} has other options or documents than process 0{named}; give all the same"
        )
