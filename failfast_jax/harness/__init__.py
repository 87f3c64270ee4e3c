"""EleutherAI's lm-evaluation-harness on an engine: `python -m failfast_jax.harness run --model failfast_jax ...`."""
