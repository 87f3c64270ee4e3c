"""Converts checkpoints to this project's own folders: fused parameters under Orbax, at a chosen dtype.

    python -m convert.qwen2 SRC OUT        Qwen2, Qwen2.5 and Llama-family models
    python -m convert.fast_dllm SRC OUT    Fast-dLLM v2 drafters
    python -m convert.gguf SRC OUT         GGUF files of llama.cpp

`failfast_jax.load_model` reads all these sources directly, too. A conversion fixes the dtype on disk,
dequantises once, and gives training and sharding code a checkpoint that Orbax restores by itself.
"""

import failfast_jax as failfast_jax  # before the imports that take seconds: Ctrl-C ends a command then, too
