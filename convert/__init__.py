"""Converts checkpoints to this project's own folders: fused parameters under Orbax, at a chosen dtype.

    python -m convert SRC OUT

`failfast_jax.load_model` reads all these sources directly, too. A conversion fixes the dtype on disk, dequantises once,
and gives training and sharding code a checkpoint that Orbax restores by itself.
"""

import failfast_jax as failfast_jax  # before the imports that take seconds: Ctrl-C ends a command then, too
