"""Converts GGUF files of llama.cpp: `python -m convert.gguf SRC OUT`."""

from __future__ import annotations

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.gguf",
    description="Convert a GGUF file (llama and qwen2 architectures, every quantisation that the gguf package "
    "dequantises), with the tokenizer inside it.",
    source_help="a .gguf file",
    kinds=("gguf",),
    model_types=("qwen2", "llama"),
    hints={"hf": "use python -m convert.qwen2 or convert.fast_dllm", "native": "it is converted already"},
    default_dtype="float32",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
