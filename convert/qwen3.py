"""Converts dense Qwen3 checkpoints: `python -m convert.qwen3 SRC OUT`."""

from __future__ import annotations

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.qwen3",
    description="Convert a dense Qwen3 checkpoint (autoregressive models, used as targets or as drafters) from "
    "Hugging Face format.",
    source_help="a folder with config.json and safetensors, or a Hugging Face Hub id such as Qwen/Qwen3-8B",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
