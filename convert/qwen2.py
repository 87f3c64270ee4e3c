"""Converts Qwen2, Qwen2.5 and Llama-family checkpoints: `python -m convert.qwen2 SRC OUT`."""

from __future__ import annotations

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.qwen2",
    description="Convert a Qwen2, Qwen2.5 or Llama-family checkpoint (autoregressive models, used as targets or "
    "as drafters) from Hugging Face format.",
    source_help="a folder with config.json and safetensors, or a Hugging Face Hub id",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
