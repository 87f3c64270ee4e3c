"""Metrics of a queue and its server, in Prometheus' format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from failfast_jax.serving.answer import Finished
from failfast_jax.serving.queue import Queue

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Metrics(Collector):
    """Metrics of a queue, of its answers and of HTTP responses.

    Attributes:
      responses, stream_errors: counters by status.
    """

    def __init__(self, queue: Queue):
        self._queue, self._registry = queue, CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory and time of the process, on Linux

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"failfast_{name}_seconds", help, buckets=SECONDS, registry=self._registry)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"failfast_{name}", help, ("status",), registry=self._registry)

        self._waited = histogram("waited", "from a request to the start of its prefill")
        self._first = histogram("first_token", "from a request to its first token")
        self._whole = histogram("request", "from a request to the end of its answer")
        self.responses = counter("responses", "HTTP responses by status; streams that fail later count as 200")
        self.stream_errors = counter("stream_errors", "errors in streams by their status")

    def collect(self) -> Iterator[Metric]:
        """Yields the queue's counters and gauges, with their present values."""
        counts, scheduler = self._queue.scheduler.counts, self._queue.scheduler
        for field in dataclasses.fields(counts):
            if help := field.metadata.get("help"):
                yield CounterMetricFamily(f"failfast_{field.name}", help, value=getattr(counts, field.name))
        help = "programs that were compiled, or read from the compile cache"
        yield CounterMetricFamily("failfast_compilations", help, value=self._queue.compilations.requests)
        requests = CounterMetricFamily("failfast_requests", "requests by reason of their end", labels=("reason",))
        for reason, count in sorted(dict(counts.finished).items()):
            requests.add_metric((reason,), count)
        yield requests
        for name, help, value in (
            ("queue_length", "requests that wait for a row", scheduler.waiting),
            ("rows", "rows", self._queue.batch),
            ("rows_busy", "rows that decode", scheduler.busy),
        ):
            yield GaugeMetricFamily(f"failfast_{name}", help, value=value)

    def on_finished(self, answer: Finished) -> None:
        """Records the times of an answer."""
        self._waited.observe(answer.waited_s)
        self._whole.observe(answer.total_s)
        if answer.first_s is not None:
            self._first.observe(answer.first_s)

    def text(self) -> bytes:
        """The page `/metrics`."""
        return generate_latest(self._registry)
