"""Loading models: a target or drafter with its own tokens, or a drafter that borrows from its target.

How each layout is read: `sources` finds out which one it is; `mapping` has the tables of Hugging Face's and llama.cpp's
names, `safetensors`, `gguf` and `native` read the files, `drafter` the folders of trained drafters.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from failfast_jax.checkpoints import drafter
from failfast_jax.checkpoints.sources import DTYPES, open_source
from failfast_jax.errors import CheckpointError
from failfast_jax.models import quantization
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.transformer import Decoder

DRAFTER_LAYOUTS = (drafter,)
"""Modules that know a layout of drafters which borrow from their target, each with `is_drafter_folder(path)` and
`load_drafter(path, target, target_name)`."""


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    quantize: str | None = None,
    progress: bool | None = None,
) -> Decoder:
    """Loads a decoder; its attributes `config` and `logits` are what most callers want.

    The host holds at most the model and one parameter (two while Orbax restores a converted folder);
    names and shapes are checked before any tensor is read.

    Args:
      path_or_hub_id: a Hugging Face folder (`config.json` and safetensors), a `.gguf` file, a folder
        written by `python -m convert...`, or a Hugging Face Hub id (from the cache when offline).
      dtype: float32, bfloat16 or float16; None is float32 on CPU and bfloat16 on TPU and GPU.
      quantize: one of `quantization.SCHEMES`; each matrix is rounded as soon as it has been read (those of a
        converted folder once all are there), so that the whole model need not fit.
      progress: shows a progress bar on stderr; None: on a terminal, once loading has taken 3 seconds.

    Raises:
      CheckpointError: nothing loadable is there, or its tensors are missing, unexpected, mis-shaped,
        damaged, or pickled.
      ConfigError: the model's configuration cannot be served.
      OptionError: an unknown scheme, or its library is not installed.
      ValueError: an unknown dtype. (All errors above are ValueErrors, too.)
    """
    quantization.check(quantize)
    return open_source(path_or_hub_id).load(as_dtype(dtype), quantize=quantize, progress=progress)


def is_drafter_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `path` holds a drafter that borrows from its target: one for `load_drafter`, not for `load_model`."""
    return any(layout.is_drafter_folder(path) for layout in DRAFTER_LAYOUTS)


def load_drafter(path: str | os.PathLike[str], target: Decoder, target_name: str = "the target") -> DrafterModel:
    """Loads a drafter that borrows from its target, in the target's dtype.

    Raises:
      CheckpointError: not such a folder; missing, unexpected, mis-shaped or damaged parameters.
      ConfigError: a configuration that cannot be served, or a drafter of another target.
    """
    for layout in DRAFTER_LAYOUTS:
        if layout.is_drafter_folder(path):
            return layout.load_drafter(path, target, target_name)
    raise CheckpointError(f"{path}: not a folder of a drafter that belongs to a target")


def as_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from a name, a numpy or a jax dtype; None is the backend's default.

    Raises:
      ValueError: not one of float32, bfloat16, float16.
    """
    if dtype is None:
        return DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
    try:
        name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return DTYPES[name]
