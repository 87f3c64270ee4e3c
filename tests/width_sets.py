"""Few widths for tests: each one is compiled, and under `exact` checked."""

from failfast_jax.decoding.width_plan import Widths

SUITE = Widths(verify=(1, 16, 64), prefill=(32, 128))
"""Widths of most tests."""
SHORT = Widths(verify=(1, 8, 16), prefill=(32,), exact=24)
"""For short texts and drafts."""
SHORTEST = Widths(verify=(1, 8), prefill=(32,))
