"""Lossless speculative decoding with block-diffusion drafters ("Fail Fast, Win Big"), compiled by XLA.

Importing it changes nothing in a process, and takes no time: each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from failfast_jax._version import __version__

if TYPE_CHECKING:
    from failfast_jax.checkpoints.checkpoint import load_model as load_model
    from failfast_jax.engine import FailFast as FailFast
    from failfast_jax.engine import Result as Result
    from failfast_jax.engine import StreamEvent as StreamEvent
    from failfast_jax.generation_config import GenerationConfig as GenerationConfig
    from failfast_jax.load_options import LoadOptions as LoadOptions
    from failfast_jax.models.model_config import ModelConfig as ModelConfig
    from failfast_jax.runtime.model_runtime import Request as Request
    from failfast_jax.runtime.model_runtime import Runtime as Runtime
    from failfast_jax.util.compile_cache import enable_compile_cache as enable_compile_cache
    from failfast_jax.util.hardware import tell_libtpu as tell_libtpu

_MODULES = {
    "FailFast": "engine",
    "GenerationConfig": "generation_config",
    "LoadOptions": "load_options",
    "ModelConfig": "models.model_config",
    "Request": "runtime.model_runtime",
    "Result": "engine",
    "Runtime": "runtime.model_runtime",
    "StreamEvent": "engine",
    "enable_compile_cache": "util.compile_cache",
    "load_model": "checkpoints.checkpoint",
    "tell_libtpu": "util.hardware",
}
"""Modules that define the package's names."""
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'failfast_jax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"failfast_jax.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
