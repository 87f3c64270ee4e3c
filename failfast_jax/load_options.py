"""Options of loading a target and its drafter; the flags of loading are made from them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from failfast_jax.errors import OptionError
from failfast_jax.options import CommandOptions, option
from failfast_jax.util.command_line import did_you_mean


@dataclasses.dataclass(frozen=True)
class LoadOptions(CommandOptions):
    """Options of `FailFast.load`. A field with `option` has a flag of its name.

    Attributes:
      tokenizer, drafter_tokenizer: transformers tokenizers for models that are in memory already; None: the one in the
        model's folder.
      needs_tokenizer: True to refuse a target without a tokenizer before its weights are read.
      programs: a store of compiled programs to share, `engine.runtime.programs`.
      widths: a `decoding.width_plan.Widths` to choose the widths of passes from; None: the platform's.
    """

    method: str | None = option(None, "method to load for: a drafter that it does not use is not read")
    schedule: str | None = option(None, "schedule of --method failfast to load for")
    dtype: str | None = option(
        None, "weight dtype (float32 on CPU, bfloat16 elsewhere)", choices=("float32", "bfloat16", "float16")
    )
    max_seq_len: int | None = option(None, "maximum prompt + output length in tokens (the models' context)")
    attention: str | None = option(
        None, "kernel of cached attention (default: by platform; others are for comparisons)"
    )
    quantize: str | None = option(None, "round to 8 or 4 bits the matrices that the target's file holds as floats")
    quantize_drafter: str | None = option(None, "matrices of the drafter: in 8 or 4 bits, or none: as stored")
    activations: str | None = option(
        None,
        "arithmetic of quantised matrices on a CPU: rows rounded to int8 (what these files are meant for), or float32",
        choices=("int8", "float32"),
    )
    tensor_parallel: int = option(1, "devices that share each layer", least=1)
    data_parallel: int = option(1, "data-parallel replicas, which share the rows", least=1)
    rope_theta_drafter: float | None = option(
        None, "rotary base frequency of a feature-based drafter, instead of its folder's", above=0
    )
    compile_cache: str | None = option(None, "folder of compiled programs, or `off` (or set FAILFAST_COMPILE_CACHE)")
    costs: str | None = option(None, "--method auto: file with the costs of rounds, as in --json's stats (measured)")
    tokenizer: Any = None
    drafter_tokenizer: Any = None
    needs_tokenizer: bool = False
    programs: Any = None
    widths: Any = None

    def __post_init__(self) -> None:
        for name in ("compile_cache", "costs"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        if self.dtype is not None and not isinstance(self.dtype, str):
            try:
                object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
            except TypeError:
                object.__setattr__(self, "dtype", str(self.dtype))  # which is refused
        super().__post_init__()

    def changed(self, **changes: Any) -> LoadOptions:
        """Returns a copy with the fields in `changes` replaced.

        Raises:
          OptionError: a name that is no field, or a value out of its range.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes.keys() - {*names}:
            advice = did_you_mean(name, names) or f"; these are: {', '.join(names)}"
            raise OptionError(f"{name}: no option of loading{advice}")
        return dataclasses.replace(self, **changes)
