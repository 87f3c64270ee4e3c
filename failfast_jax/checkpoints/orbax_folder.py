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
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from failfast_jax.checkpoints.parameter_map import StoredTensor, not_finite
from failfast_jax.errors import CheckpointError
from failfast_jax.util.files import orbax_path

FORMAT_KEY = "failfast_format"
FORMAT = 1
PARAMS = "params"
# An unfinished conversion's folder carries this suffix until it is renamed.
PARTIAL = ".partial"


def save_params(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Writes the Orbax part of a folder: plain, uncompressed arrays; CheckpointError: it cannot be written, or not read
    again; ConfigError: see `files.orbax_path`."""
    import orbax.checkpoint as ocp

    path = folder / PARAMS
    with _checkpointer(params.values()) as checkpointer, _naming(path, "written"):
        checkpointer.save(orbax_path(path), ocp.args.PyTreeSave(unflatten_dict(params, sep=".")))
    stored = {name: tensor.shape for name, tensor in stored_params(folder).items()}
    if stored != {name: param.shape for name, param in params.items()}:
        raise CheckpointError(f"{path}: cannot be read again as it was written; convert the model again")


def load_params(
    folder: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Restores the parameters of `stored_params`, cast to the wanted dtypes while they are read.

    CheckpointError: the folder is damaged, or its parameters are not finite.
    """
    import orbax.checkpoint as ocp

    path, target = folder / PARAMS, unflatten_dict(wanted, sep=".")
    # Orbax counts bytes as they are stored or as they are wanted, whichever comes later: allow for both.
    with _checkpointer([*stored.values(), *wanted.values()]) as checkpointer, _naming(path, "read"):
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args)
        values = flatten_dict(checkpointer.restore(orbax_path(path), args=args), sep=".")
    for name, finite in jax.device_get({name: _is_finite(value) for name, value in values.items()}).items():
        if not finite:
            raise not_finite(name, path)
    return values


def stored_params(folder: Path) -> dict[str, StoredTensor]:
    """The stored parameters by name, without their data; CheckpointError: the folder is incomplete or damaged."""
    path = folder / PARAMS
    if not path.is_dir():
        raise CheckpointError(f"{folder}: incomplete: {PARAMS}/ is missing; convert the model again")
    with _checkpointer(()) as checkpointer, _naming(path, "read"):
        arrays = flatten_dict(checkpointer.metadata(orbax_path(path)).item_metadata.tree, sep=".")
    return {name: StoredTensor(name, tuple(array.shape), np.dtype(array.dtype), path) for name, array in arrays.items()}


def _checkpointer(params: Iterable[Any]) -> Any:
    import orbax.checkpoint as ocp  # a second to import, and only this format needs it

    # By default Orbax keeps up to 96 GB in flight; the largest parameter must fit.
    largest = max((math.prod(param.shape) * param.dtype.itemsize for param in params), default=0)
    limits = dict.fromkeys(("save_concurrent_gb", "restore_concurrent_gb"), (largest + 2**20) / 1e9)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, **limits))


@contextlib.contextmanager
def _naming(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises whatever its storage layers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = reason.partition("See full TensorStore details")[0].rstrip(" .;")  # how, is for programmers
        raise CheckpointError(f"{path}: cannot be {verb} ({reason}); convert the model again") from error


_is_finite = jax.jit(lambda array: jnp.isfinite(array).all())
