"""Shared by the converters: reading a source, writing a folder atomically, the command line."""

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
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError
from failfast_jax.util import command_line
from failfast_jax.util.files import FULL, claim, orbax_path, read_json, user_path, write_atomically
from failfast_jax.util.progress import add_flags

SIDE_FILES = """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model chat_template.jinja chat_template.json
    """.split()
"""Copied as they are, where the source has them."""
# Room for JSON, tokenizer files written anew, and the file system's own blocks.
SPARE_BYTES = 32 * 2**20

EVERY, GGUF = "convert", "convert.gguf"
COMMANDS = {
    "qwen2": "convert.qwen2",
    "llama": "convert.qwen2",
    "qwen3": "convert.qwen3",
    "Fast_dLLM_Qwen": "convert.fast_dllm",
    "sdar": "convert.sdar",
}
"""The command for a folder of one `model_type`; `EVERY` takes all, and GGUF files."""


def command(name: str) -> Callable[[Sequence[str] | None], int]:
    """The command line of `python -m NAME`, which takes arguments (None: the process's) and returns an exit status."""
    kinds = [kind for kind, owner in COMMANDS.items() if name in (EVERY, owner)]
    sources = [f"a folder or Hub id of model_type {', '.join(kinds)}"] if kinds else []
    sources += ["a .gguf file (its tokenizer is written, too)"] if name in (EVERY, GGUF) else []

    def main(argv: Sequence[str] | None = None) -> int:
        parser = command_line.Parser(
            prog=f"python -m {name}",
            description="Convert a checkpoint to this project's own format.",
            epilog="OUT is then a model for failfast_jax.load_model and for --target or --drafter. It appears only "
            "when it is complete; an interrupted conversion is cleaned up by the next one.",
        )
        parser.add_argument("source", metavar="SRC", help=", or ".join(sources))
        parser.add_argument("out", metavar="OUT", help="the folder to write; must not exist")
        written = "dtype of the written parameters (default: the stored one; of GGUF files float32)"
        parser.add_argument("--dtype", choices=checkpoint.DTYPES, help=written)
        parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion at OUT")
        add_flags(parser)
        options = vars(parser.parse_args(argv))
        verbosity = options.pop("verbosity")

        def work() -> None:
            out = convert(**options, name=name)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            print(f"{out}: {size / 1e6:,.1f} MB")

        return command_line.run(work, verbosity=verbosity)

    return main


def _check_source(name: str, source: checkpoint.Checkpoint) -> None:
    """Raises CheckpointError: the command of this name does not take such sources; it says which command does."""
    is_gguf, model_type = source.kind == "gguf", source.config.model_type
    right = GGUF if is_gguf else COMMANDS[model_type]
    if name not in (EVERY, right):
        kind = "GGUF files" if is_gguf else f"model_type {model_type!r}"
        raise CheckpointError(f"{source.path}: {name} does not take {kind}; use python -m {right}")


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str = EVERY,
    dtype: Any = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Converts a checkpoint into a folder that `load_model` and `load_tokenizer` take; returns its path.

    The folder appears only when it is complete. The host holds the model and at most one more parameter.

    Args:
      name: the command's, which may take sources of one kind only.
      dtype: of the stored parameters; None: as stored, or float32 for GGUF files.
      overwrite: replaces an earlier conversion at `out`, once the new one is complete.

    Raises:
      CheckpointError, ConfigError: the source cannot be loaded or is not for this command; `out` exists; the disk has
        less free space than needed.
    """
    out = user_path(out)
    _check_out(out, overwrite)
    opened = checkpoint.open_checkpoint(source)
    _check_source(name, opened)
    opened.check()
    if out.exists() and opened.path.exists() and os.path.samefile(out, opened.path):
        raise CheckpointError(f"{out}: is the source itself")
    is_gguf = opened.kind == "gguf"
    stored = as_dtype(dtype or ("float32" if is_gguf else opened.stored_dtype()))
    side_files = [opened.path / file for file in SIDE_FILES if (opened.path / file).is_file()]
    _check_space(out, opened.num_parameters() * stored.itemsize + sum(path.stat().st_size for path in side_files))
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
    if not (above := _above(out)).is_dir():
        raise CheckpointError(f"{above}: is not a folder, so {out} cannot be made in it")
    folder = out.is_dir() and not out.is_symlink()
    if (folder and not any(out.iterdir())) or not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise CheckpointError(f"{out}: exists already; pass --overwrite to replace it")
    ours = (out / "config.json").is_file() and orbax_folder.FORMAT_KEY in read_json(out / "config.json")
    if not (folder and ours):
        raise CheckpointError(f"{out}: not a converted model; remove it by hand if you mean to replace it")


def _above(out: Path) -> Path:
    """The nearest of the folders above `out` that there is."""
    return next(path for path in out.absolute().parents if path.exists())


def _check_space(out: Path, needed: int) -> None:
    parent, needed = _above(out), needed + SPARE_BYTES
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        raise CheckpointError(f"{parent}: its file system is read-only; name a folder that may be written")
    if (free := shutil.disk_usage(parent).free) < needed:
        raise CheckpointError(f"{parent}: not enough disk space: {needed:,} bytes needed, {free:,} bytes available")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which takes its place when the block ends; after an error it is removed.

    A lock on the folder itself tells a running conversion from the rest of a killed one, which is removed.
    """
    folder, old = (out.absolute().with_name(f".{out.name}{word}{orbax_folder.PARTIAL}") for word in ("", ".old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        lock = _claimed(folder)
        shutil.rmtree(folder)
        os.close(lock)
    folder.mkdir()
    lock = _claimed(folder)
    if old.exists() and not out.exists():  # killed between the two renames below
        os.rename(old, out)
    shutil.rmtree(old, ignore_errors=True)
    try:
        yield folder
        if out.exists():
            os.rename(out, old)
        os.rename(folder, out)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        if _is_disk_full(error):
            free = shutil.disk_usage(folder).free
            raise CheckpointError(
                f"{folder.parent}: the disk filled up during the conversion ({free:,} bytes available)"
            ) from error
        raise
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _claimed(folder: Path) -> int:
    try:
        return claim(folder)
    except BlockingIOError:
        raise CheckpointError(f"{folder}: another conversion to the same place is running") from None


def _is_disk_full(error: BaseException | None) -> bool:
    """True if an error, or a cause of it, is a full disk; TensorStore wraps the errno in text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(os.strerror(code) in str(error) for code in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def run(main: Callable[[], int]) -> None:
    """Runs a command line as a program."""
    # Conversions happen on the host; an accelerator may be in use by someone else.
    jax.config.update("jax_platforms", "cpu")
    # A failed write otherwise prints a traceback per parameter before the one line that says why.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    sys.exit(main())
