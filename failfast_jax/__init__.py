"""Lossless speculative decoding with block-diffusion drafters ("Fail Fast, Win Big"), compiled by XLA."""

from failfast_jax import starting

starting.begin()  # before the imports that take seconds

from failfast_jax._version import __version__
from failfast_jax.checkpoints.loading import load_model
from failfast_jax.config import GenerationConfig
from failfast_jax.engine import FailFast, Result, StreamEvent
from failfast_jax.models.config import ModelConfig
from failfast_jax.runtime import Request, Runtime

__all__ = [
    "FailFast",
    "GenerationConfig",
    "ModelConfig",
    "Request",
    "Result",
    "Runtime",
    "StreamEvent",
    "__version__",
    "load_model",
]
