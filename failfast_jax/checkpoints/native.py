"""This project's own checkpoint folder: Hugging Face's JSON and tokenizer files beside Orbax parameters.

config.json             the model's `config.json` with `failfast_format`, written last
params/                 Orbax, the decoder's parameters under their own paths
generation_config.json, tokenizer files    as in the source, where it has any
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from failfast_jax.errors import CheckpointError

FORMAT_KEY = "failfast_format"
FORMAT = 1
PARAMS = "params"
# An unfinished conversion's folder carries this suffix until it is renamed.
PARTIAL = ".partial"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"layers.0.mlp": x}` as `{"layers": {"0": {"mlp": x}}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def save_params(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Writes the Orbax part of a folder: plain, uncompressed arrays."""
    import orbax.checkpoint as ocp

    with _checkpointer(params.values()) as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), ocp.args.PyTreeSave(nested(params)))


def load_params(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restores parameters, cast to the wanted dtypes while they are read.

    Raises:
      CheckpointError: the folder is incomplete or damaged, or its parameters are not the wanted ones.
    """
    import orbax.checkpoint as ocp

    stored = stored_params(folder)
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in wanted]
    problems += [
        f"{name} is {list(stored[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted
        if name in stored and tuple(stored[name].shape) != tuple(wanted[name].shape)
    ]
    if problems:
        raise CheckpointError(f"{folder / PARAMS}: parameters do not fit config.json: {', '.join(problems[:5])}")
    target = nested(wanted)
    # Orbax counts bytes as they are stored or as they are wanted, whichever comes later: allow for both.
    with _checkpointer([*stored.values(), *wanted.values()]) as checkpointer:
        try:
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            args = ocp.args.PyTreeRestore(target, restore_args=restore_args)
            return flattened(checkpointer.restore((folder / PARAMS).absolute(), args=args))
        except Exception as error:
            raise _damaged(folder / PARAMS, error) from error


def stored_params(folder: Path) -> dict[str, Any]:
    """Shape and dtype of each stored parameter.

    Raises:
      CheckpointError: the folder is incomplete or damaged.
    """
    path = folder / PARAMS
    if not path.is_dir():
        raise CheckpointError(f"{folder}: incomplete: {PARAMS}/ is missing; convert the model again")
    with _checkpointer(()) as checkpointer:
        try:
            return flattened(checkpointer.metadata(path.absolute()).item_metadata.tree)
        except Exception as error:  # Orbax raises whatever its storage layers raise.
            raise _damaged(path, error) from error


def _checkpointer(params: Iterable[Any]) -> Any:
    import orbax.checkpoint as ocp  # a second to import, and only this format needs it

    # By default Orbax keeps up to 96 GB in flight; the largest parameter must fit.
    largest = max((math.prod(param.shape) * param.dtype.itemsize for param in params), default=0)
    gigabytes = (largest + 2**20) / 1e9
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_compression=False, save_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
        )
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CheckpointError(f"{path}: cannot be read ({reason}); convert the model again")
