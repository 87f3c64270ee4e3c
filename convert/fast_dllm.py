"""Converts Fast-dLLM v2 checkpoints: `python -m convert.fast_dllm SRC OUT`."""

from __future__ import annotations

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.fast_dllm",
    description="Convert a Fast-dLLM v2 checkpoint (block-diffusion drafters, model_type Fast_dLLM_Qwen) from "
    "Hugging Face format.",
    source_help="a folder with config.json and safetensors, or a Hugging Face Hub id such as "
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
