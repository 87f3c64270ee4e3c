"""What a queue does, in Prometheus' format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from failfast_jax.compilation import compile_counts
from failfast_jax.serving.middleware import refuse
from failfast_jax.serving.request_queue import Finished, Queue

logger = logging.getLogger("failfast_jax")

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class _OfQueue(Collector):
    """Counts and gauges, read when they are asked for."""

    def __init__(self, queue: Queue):
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        counts, scheduler = self._queue.scheduler.counts, self._queue.scheduler
        compiled = compile_counts().requests
        for name, said, value in (
            ("prompt_tokens", "tokens of prompts", counts.prompt_tokens),
            ("reused_tokens", "tokens of prompts that no prefill computed again", counts.reused_tokens),
            ("output_tokens", "tokens emitted", counts.output_tokens),
            ("rounds", "rounds of finished requests", counts.rounds),
            ("drafted_tokens", "tokens drafted for finished requests", counts.drafted),
            ("accepted_tokens", "of these, tokens that the target agreed with", counts.accepted),
            ("slices", "dispatches of the decoding loop", counts.slices),
            ("busy_rows", "rows that decoded, summed over slices", counts.busy_rows),
            ("decode_seconds", "time spent decoding", counts.decode_s),
            ("compilations", "programs that were compiled, or read from the cache of compiled ones", compiled),
        ):
            yield CounterMetricFamily(f"failfast_{name}", said, value=value)
        requests = CounterMetricFamily("failfast_requests", "requests by why they ended", labels=("reason",))
        for reason, count in sorted(dict(counts.finished).items()):
            requests.add_metric((reason,), count)
        yield requests
        for name, said, value in (
            ("queue_length", "requests that wait for a row", self._queue.waiting),
            ("rows", "rows", self._queue.batch),
            ("rows_busy", "rows that decode", scheduler.busy),
            ("tokens_per_second", "tokens emitted a second of decoding", counts.output_tokens / (counts.decode_s or 1)),
            ("acceptance", "accepted of drafted tokens, of finished requests", counts.accepted / (counts.drafted or 1)),
            (
                "tokens_per_round",
                "accepted tokens a round and the target's own: papers' tau",
                1 + counts.accepted / counts.rounds if counts.rounds else 0,
            ),
        ):
            yield GaugeMetricFamily(f"failfast_{name}", said, value=value)


class Metrics:
    """The metrics of a queue."""

    def __init__(self, queue: Queue):
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_OfQueue(queue))
        ProcessCollector(registry=self._registry)  # memory and time of the process, where the system tells them

        def histogram(name: str, said: str) -> Histogram:
            return Histogram(f"failfast_{name}_seconds", said, buckets=SECONDS, registry=self._registry)

        self._waited = histogram("waited", "from a request to the begin of its prefill")
        self._first = histogram("first_token", "from a request to its first token")
        self._whole = histogram("request", "from a request to the end of its answer")
        said = "HTTP responses by status; streams that end in an error have counted as 200 already"
        self._responses = Counter("failfast_responses", said, ("status",), registry=self._registry)
        said = "errors in streams, by the status that they say"
        self._in_streams = Counter("failfast_stream_errors", said, ("status",), registry=self._registry)

    def finished(self, one: Finished) -> None:
        """Takes note of an answer."""
        self._waited.observe(one.waited_s)
        self._whole.observe(one.total_s)
        if one.first_s is not None:
            self._first.observe(one.first_s)

    def responded(self, status: int) -> None:
        """Takes note of a response."""
        self._responses.labels(str(status)).inc()

    def failed(self, status: int) -> None:
        """Takes note of an error within a stream."""
        self._in_streams.labels(str(status)).inc()

    def text(self) -> bytes:
        """What `/metrics` shows."""
        return generate_latest(self._registry)


class CountedResponses:
    """Counts an application's responses by their status. What it raises is logged, and answered with a 500; what is
    cancelled because the server ends, with a 503."""

    def __init__(self, app: Any, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def counted(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.responded(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:  # the server's own task: nobody is above it but uvicorn, which would log it
            if not begun:
                await refuse(counted, 503, "the server ends")
        except Exception:
            if begun:
                raise
            logger.exception("a request failed")
            await refuse(counted, 500, "the server has failed; see its log")
