"""How fast weights are loaded, beside how fast the same files can be read through."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.checkpoints.loading import READERS, open_source
from failfast_jax.errors import OptionError

PIECE = 2**24
"""Bytes that a reader asks for at a time."""
REPEATS = 5


def loading_report(folder: Path) -> dict[str, Any]:
    """Seconds of loading a model in its stored dtype, and of reading its files with as many readers.

    Both with the files in memory (`warm`) and behind a request to the system to forget them (`cold`).

    Args:
      folder: a Hugging Face folder, or a GGUF file.

    Raises:
      CheckpointError, ConfigError: as of `load_model`.
      OptionError: the system cannot be asked to forget a file.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OptionError("--parts loading: this system cannot be asked to forget a file; run it on Linux")
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    report: dict[str, Any] = {"gigabytes": sum(file.stat().st_size for file in files) / 1e9}

    def load() -> Any:
        source = open_source(folder)
        return jax.tree.leaves(source.load(source.stored_dtype(), progress=False))

    acts = {"read": lambda: read_through(files), "load": load}
    for name, before in (("cold", lambda: forget(files)), ("warm", None)):
        seconds = medians(interleaved(acts, REPEATS, before))
        ratio = seconds["load"] / seconds["read"]
        report[name] = {"read_s": seconds["read"], "load_s": seconds["load"], "load_per_read": ratio}
    return report


def forget(files: list[Path]) -> None:
    """Asks the system to drop what it holds of files in memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(files: list[Path]) -> None:
    """Reads every byte of the files once, in pieces, `READERS` at a time."""
    pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, PIECE)]

    def read(piece: tuple[Path, int]) -> None:
        with piece[0].open("rb", buffering=0) as file:
            file.seek(piece[1])
            file.read(PIECE)

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(read, pieces):
            pass
