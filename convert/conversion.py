"""The converter: reads a source, writes a folder atomically; its command line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from failfast_jax.checkpoints import checkpoint, orbax_folder
from failfast_jax.checkpoints.checkpoint import as_dtype
from failfast_jax.checkpoints.hub import OLDER_TOKENIZERS, TOKENIZER_FILES
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError
from failfast_jax.models.config_keys import FAMILIES
from failfast_jax.util import command_line
from failfast_jax.util.files import claim, orbax_path, read_json, user_path, write_atomically
from failfast_jax.util.progress import add_flags

SIDE_FILES = ("generation_config.json", *TOKENIZER_FILES, *OLDER_TOKENIZERS, "chat_template.json")
"""Copied unchanged if the source has them."""
# Room for JSON, tokenizer files written anew, and the file system's own blocks.
SPARE_BYTES = 32 * 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, whose arguments are `argv` or the process's; returns its exit status."""
    kinds = ", ".join(FAMILIES)
    parser = command_line.Parser(
        prog="python -m convert",
        description="Convert a checkpoint to this project's own format.",
        epilog="OUT is then a model for failfast_jax.load_model and for --target or --drafter. It appears only "
        "when it is complete; an interrupted conversion is cleaned up by the next one.",
    )
    parser.add_argument("source", metavar="SRC", help=f"a .gguf file, or a folder or Hub id of model_type {kinds}")
    parser.add_argument("out", metavar="OUT", help="the folder to write; must not exist")
    written = "dtype of the written parameters (default: the stored one; of GGUF files float32)"
    parser.add_argument("--dtype", choices=checkpoint.DTYPES, help=written)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion at OUT")
    add_flags(parser)
    options = vars(parser.parse_args(argv))
    verbosity = options.pop("verbosity")

    def work() -> None:
        out = convert(**options)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        print(f"{out}: {size / 1e6:,.1f} MB")

    return command_line.run(work, verbosity=verbosity)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Any = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Converts a checkpoint into a folder that `load_model` and `load_tokenizer` take; returns its path.

    The folder appears only when it is complete. The host holds the model and at most one more parameter.

    Args:
      dtype: dtype of the stored parameters; None: as stored, or float32 for GGUF files.
      overwrite: replaces an earlier conversion at `out`, once the new one is complete.

    Raises:
      CheckpointError, ConfigError: the source cannot be loaded; `out` exists; the disk has less free space than
        needed.
    """
    out = user_path(out)
    _check_out(out, overwrite)
    opened = checkpoint.open_checkpoint(source)
    opened.check()
    if out.exists() and opened.path.exists() and os.path.samefile(out, opened.path):
        raise CheckpointError(f"{out}: is the source itself")
    is_gguf = opened.path.is_file()
    stored = as_dtype(dtype or ("float32" if is_gguf else opened.stored_dtype()))
    side_files = [opened.path / file for file in SIDE_FILES if (opened.path / file).is_file()]
    needed = SPARE_BYTES + opened.num_parameters() * stored.itemsize + sum(file.stat().st_size for file in side_files)
    parent = _nearest_folder(out)
    if (free := shutil.disk_usage(parent).free) < needed:
        raise CheckpointError(f"{parent}: not enough disk space: {needed:,} bytes needed, {free:,} bytes available")
    tokenizer = load_tokenizer(opened.path) if is_gguf else None
    with new_folder(out) as folder:
        host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        params = opened.read(stored, place=lambda path, shape: host, progress=progress)
        orbax_folder.save_params(folder, params)
        for path in side_files:
            shutil.copyfile(path, folder / path.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        # Last: a folder without it is refused.
        write_atomically(folder / "config.json", json.dumps(_config(opened, stored), indent=2) + "\n")
    return out


def _config(source: checkpoint.Checkpoint, dtype: np.dtype) -> dict[str, Any]:
    config = {key: value for key, value in source.raw_config.items() if key not in ("torch_dtype", "dtype")}
    config |= {orbax_folder.FORMAT_KEY: orbax_folder.FORMAT, "dtype": dtype.name}
    config["eos_token_id"] = list(source.config.eos_token_ids)
    if source.config.mask_token_id is not None:
        config["mask_token_id"] = source.config.mask_token_id
    return config


def _check_out(out: Path, overwrite: bool) -> None:
    orbax_path(out / orbax_folder.PARAMS)
    if not (above := _nearest_folder(out)).is_dir():
        raise CheckpointError(f"{above}: is not a folder, so {out} cannot be made in it")
    is_folder = out.is_dir() and not out.is_symlink()
    if (is_folder and not any(out.iterdir())) or not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise CheckpointError(f"{out}: exists already; pass --overwrite to replace it")
    is_converted = (out / "config.json").is_file() and orbax_folder.FORMAT_KEY in read_json(out / "config.json")
    if not (is_folder and is_converted):
        raise CheckpointError(f"{out}: not a converted model; remove it by hand if you mean to replace it")


def _nearest_folder(out: Path) -> Path:
    """The nearest existing path above `out`."""
    return next(path for path in out.absolute().parents if path.exists())


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which takes its place at the end of the block; after an error it is removed.

    A lock on the folder distinguishes a running conversion from the rest of a killed one.
    """
    folder, old = (out.absolute().with_name(f".{out.name}{word}{orbax_folder.PARTIAL}") for word in ("", ".old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # the rest of a killed conversion
        lock = _lock(folder)
        shutil.rmtree(folder)
        os.close(lock)
    folder.mkdir()
    lock = _lock(folder)
    if old.exists() and not out.exists():  # killed between the two renames below
        os.rename(old, out)
    shutil.rmtree(old, ignore_errors=True)
    try:
        yield folder
        if out.exists():
            os.rename(out, old)
        os.rename(folder, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    try:
        return claim(folder)
    except BlockingIOError:
        raise CheckpointError(f"{folder}: another conversion to the same place is running") from None


def run(main: Callable[[], int]) -> None:
    """Runs the command line as a program."""
    # Conversions happen on the host; an accelerator may be in use by someone else.
    jax.config.update("jax_platforms", "cpu")
    # A failed write otherwise prints a traceback per parameter before the one line that says why.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    sys.exit(main())
