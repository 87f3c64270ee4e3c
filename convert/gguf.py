"""Converts GGUF files of llama.cpp: `python -m convert.gguf SRC OUT`."""

from __future__ import annotations

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

from convert import conversion

CONVERTER = conversion.Converter(
    command="convert.gguf",
    description="Convert a GGUF file (llama, qwen2 and qwen3 architectures, every quantisation that the gguf package "
    "dequantises), with the tokenizer inside it (SentencePiece's or byte-level BPE).",
    source_help="a .gguf file",
    kinds=("gguf",),
    model_types=("qwen2", "qwen3", "llama"),
    default_dtype="float32",
)
main = CONVERTER.main

if __name__ == "__main__":
    conversion.run(main)
