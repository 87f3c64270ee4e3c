"""Training of drafters: block-diffusion adaptation and alignment to a target."""

UNFINISHED = 3
"""Exit status of a command that `--minutes` ended before its work was done: the same command goes on."""
