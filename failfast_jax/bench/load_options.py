"""How a server is loaded by `bench soak --clients`, and what it may cost."""

from __future__ import annotations

import dataclasses

from failfast_jax.options import CommandOptions, option


@dataclasses.dataclass(frozen=True)
class LoadOptions(CommandOptions):
    """The load, and its limits."""

    clients: int | None = option(None, "load a server with so many at once, instead of a queue", least=1, most=10_000)
    requests: int | None = option(None, "end after so many, instead of --minutes", least=1, most=10**7)
    kill: float = option(0.0, "share of the requests whose client hangs up", least=0, most=1)
    waiting: int = option(64, "most requests that wait for a row; see serve", least=1, most=65536)
    max_new_tokens: int = option(64, "tokens of the longest answers", least=1, most=2**20)
    growth: float = option(2.0, "percent by which memory may grow", least=0)
    overhead: float = option(5.0, "milliseconds of a request beside the engine's own, median", least=0)
    first_token: float = option(1.2, "times of its prefill that a first token may take", least=1)
