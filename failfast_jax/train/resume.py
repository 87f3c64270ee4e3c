"""What lets a command be ended at any moment and started again: a folder that knows its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from failfast_jax.errors import OptionError
from failfast_jax.files import differences, read_json, write_atomically


def is_begun(file: Path, settings: dict[str, Any], foreign: str | None = None) -> bool:
    """Whether the folder of a settings file was begun with these settings; False: it is new.

    Args:
      foreign: files of this pattern, in a folder without settings, belong to somebody else.

    Raises:
      OptionError: the folder was begun with other settings, is no folder, or belongs to something else.
    """
    folder = file.parent
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--out {folder}: not a folder")
    if file.exists():
        if others := differences(read_json(file), json.loads(json.dumps(settings))):
            raise OptionError(
                f"--out {folder}: was begun with other settings ({'; '.join(others)}); name another folder"
            )
        return True
    # A killed start may have left a part of its settings.
    if foreign and any(path.name != f"{file.name}.part" for path in folder.glob(foreign)):
        raise OptionError(f"--out {folder}: not empty, and no {file.name} in it; name another folder")
    return False


def begin(file: Path, settings: dict[str, Any], foreign: str | None = None) -> bool:
    """As `is_begun`; a new folder is made, and its settings written."""
    if is_begun(file, settings, foreign):
        return True
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(settings, indent=1) + "\n")
    return False
