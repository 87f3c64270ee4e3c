"""Lossless speculative decoding with block-diffusion drafters ("Fail Fast, Win Big"), compiled by XLA."""

from failfast_jax._version import __version__
from failfast_jax.config import GenerationConfig, ModelConfig
from failfast_jax.engine import FailFast, Result, StreamEvent
from failfast_jax.loading import load_model

__all__ = ["FailFast", "GenerationConfig", "ModelConfig", "Result", "StreamEvent", "__version__", "load_model"]
