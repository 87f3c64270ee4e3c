"""Converts SDAR checkpoints: `python -m convert.sdar SRC OUT`."""

from __future__ import annotations

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.sdar",
    description="Convert an SDAR checkpoint (block diffusion on Qwen3, model_type sdar: a drafter of Qwen3 targets, or "
    "on its own) from Hugging Face format.",
    source_help="a folder with config.json and safetensors, or a Hugging Face Hub id such as JetLM/SDAR-1.7B-Chat",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
