"""`bench paper`: the tables, figures and numbers of "Fail Fast, Win Big" from records."""

from failfast_jax.bench.paper.reproduction import add_arguments, work

__all__ = ["add_arguments", "work"]
