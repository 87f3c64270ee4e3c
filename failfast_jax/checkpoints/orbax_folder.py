"""This project's own checkpoint folder: Hugging Face's JSON and tokenizer files beside Orbax parameters.

config.json             the model's `config.json` with `failfast_format`, written last
params/                 Orbax, the decoder's parameters under their own paths
generation_config.json, tokenizer files    as in the source, where it has any
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from failfast_jax.checkpoints.parameters import check_finite, misfits
from failfast_jax.errors import CheckpointError
from failfast_jax.util.files import orbax_path

FORMAT_KEY = "failfast_format"
FORMAT = 1
PARAMS = "params"
# An unfinished conversion's folder carries this suffix until it is renamed.
PARTIAL = ".partial"


def save_params(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Writes the Orbax part of a folder: plain, uncompressed arrays.

    Raises:
      CheckpointError: it cannot be read again.
      ConfigError: see `files.orbax_path`.
    """
    import orbax.checkpoint as ocp

    with _checkpointer(params.values()) as checkpointer:
        checkpointer.save(orbax_path(folder / PARAMS), ocp.args.PyTreeSave(unflatten_dict(params, sep=".")))
    check(folder, params)


def load_params(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restores parameters, cast to the wanted dtypes while they are read.

    CheckpointError: the folder is incomplete or damaged, or its parameters are not the wanted ones, or not finite.
    """
    import orbax.checkpoint as ocp

    stored, path, target = check(folder, wanted), folder / PARAMS, unflatten_dict(wanted, sep=".")
    # Orbax counts bytes as they are stored or as they are wanted, whichever comes later: allow for both.
    with _checkpointer([*stored.values(), *wanted.values()]) as checkpointer, _naming(path):
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args)
        values = flatten_dict(checkpointer.restore(orbax_path(path), args=args), sep=".")
    check_finite(values, path)
    return values


def check(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> dict[str, Any]:
    """Checks names and shapes against the wanted ones; returns and raises what `stored_params` does."""
    stored = stored_params(folder)
    if problems := misfits(stored, wanted):
        raise CheckpointError(f"{folder / PARAMS}: parameters do not fit config.json: {problems}")
    return stored


def stored_params(folder: Path) -> dict[str, Any]:
    """Shape and dtype of each stored parameter; CheckpointError: the folder is incomplete or damaged."""
    path = folder / PARAMS
    if not path.is_dir():
        raise CheckpointError(f"{folder}: incomplete: {PARAMS}/ is missing; convert the model again")
    with _checkpointer(()) as checkpointer, _naming(path):
        return flatten_dict(checkpointer.metadata(orbax_path(path)).item_metadata.tree, sep=".")


def _checkpointer(params: Iterable[Any]) -> Any:
    import orbax.checkpoint as ocp  # a second to import, and only this format needs it

    # By default Orbax keeps up to 96 GB in flight; the largest parameter must fit.
    largest = max((math.prod(param.shape) * param.dtype.itemsize for param in params), default=0)
    limits = dict.fromkeys(("save_concurrent_gb", "restore_concurrent_gb"), (largest + 2**20) / 1e9)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, **limits))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises whatever its storage layers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = reason.partition("See full TensorStore details")[0].rstrip(" .;")  # how, is for programmers
        raise CheckpointError(f"{path}: cannot be read ({reason}); convert the model again") from error
