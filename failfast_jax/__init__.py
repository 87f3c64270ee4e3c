"""Lossless speculative decoding with block-diffusion drafters ("Fail Fast, Win Big"), compiled by XLA.

Importing it changes nothing in a process, and takes no time: each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from failfast_jax._version import __version__

if TYPE_CHECKING:
    from failfast_jax.checkpoints.checkpoint import load_model
    from failfast_jax.engine import FailFast, Result, StreamEvent
    from failfast_jax.generation_config import GenerationConfig
    from failfast_jax.load_options import LoadOptions
    from failfast_jax.models.model_config import ModelConfig
    from failfast_jax.runtime.model_runtime import Request, Runtime
    from failfast_jax.util.compile_cache import enable_compile_cache
    from failfast_jax.util.hardware import tell_libtpu

__all__ = [
    "FailFast",
    "GenerationConfig",
    "LoadOptions",
    "ModelConfig",
    "Request",
    "Result",
    "Runtime",
    "StreamEvent",
    "__version__",
    "enable_compile_cache",
    "load_model",
    "tell_libtpu",
]

_MODULES = {
    "checkpoints.checkpoint": ("load_model",),
    "util.compile_cache": ("enable_compile_cache",),
    "generation_config": ("GenerationConfig",),
    "engine": ("FailFast", "Result", "StreamEvent"),
    "load_options": ("LoadOptions",),
    "models.model_config": ("ModelConfig",),
    "util.hardware": ("tell_libtpu",),
    "runtime.model_runtime": ("Request", "Runtime"),
}
"""Names of `__all__` by the modules that define them."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"failfast_jax.{module}"), name)
            return value
    raise AttributeError(f"module 'failfast_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
