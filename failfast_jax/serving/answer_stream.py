"""The answers to one HTTP request, passed from the queue's thread to the event loop, their JSON, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from failfast_jax.errors import OptionError, PromptError, PromptTooLong
from failfast_jax.serving.answer import Answer, Finished, Piece
from failfast_jax.serving.openai_protocol import SEEDS, ChatRequest, CompletionRequest, Reply, RequestError, Spelling
from failfast_jax.serving.queue import Queue, QueueClosed, QueueFull
from failfast_jax.serving.serve_options import ServeOptions

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
TOO_LONG = "context_length_exceeded"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
"""Bounds of the buckets of times."""


def refusal(error: Exception) -> RequestError:
    """The reason why a queue gives no answer, for a client."""
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(round(error.seconds))}
        return RequestError(f"{error}; try again", status=429, code="queue_full", **wait)
    if isinstance(error, QueueClosed):
        return RequestError(f"the server cannot answer: {error}", status=503, code="unavailable")
    if isinstance(error, (OptionError, PromptError)):
        return RequestError(str(error), param=str(error).split()[0])
    return RequestError(str(error), status=500)


class AnswerStream:
    """The answers to one HTTP request, within the service's `timeout` from the construction on.

    Attributes:
      finished: whole answers, by choice.
    """

    def __init__(self, service: Service, request: Request):
        self._service, self._request, timeout = service, request, service.options.timeout
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        """Pieces by choice, or the reason why there will be no more."""
        late = RequestError(f"no whole answer within {timeout} seconds", status=504, code="timeout")
        self._timer = self._loop.call_later(timeout, self._items.put_nowait, late)
        self._left = False
        self._answers: list[Answer] = []
        self.finished: dict[int, Finished] = {}

    def leave(self) -> None:
        """Cancels unfinished answers, which frees their rows. May be called more than once."""
        self._left = True
        self._timer.cancel()
        for answer in self._answers:
            answer.cancel()

    def submit(self, submissions: list[dict[str, Any]]) -> None:
        """Puts an answer in line for each (arguments of `Queue.submit`), or none. For any thread.

        Raises:
          RequestError: the queue does not take them.
        """
        try:
            for index, options in enumerate(submissions):
                on_piece = functools.partial(self._on_piece, index)
                self._answers.append(self._service.queue.submit(on_piece=on_piece, **options))
        except (OptionError, PromptError, QueueFull, QueueClosed) as error:
            raise refusal(error) from None
        finally:
            if self._left:  # while this thread worked
                self.leave()

    def _on_piece(self, index: int, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all answers, until all have ended.

        Raises:
          ClientDisconnect: the client went away.
          RequestError: time is up, or an answer failed.
        """
        watch = asyncio.create_task(self._watch_client())
        try:
            while len(self.finished) < len(self._answers):
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                index, piece = item
                if piece.error is not None:
                    raise refusal(piece.error)
                if piece.finished is not None:
                    self._service.metrics.on_finished(piece.finished)
                    self.finished[index] = piece.finished
                yield index, piece
        finally:
            watch.cancel()
            self.leave()

    async def _watch_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._items.put_nowait(ClientDisconnect())


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


class Service:
    """Answers checked requests.

    Args:
      queue: open.
      options: options of the server.
      model: name of the model in the API.
    """

    def __init__(self, queue: Queue, options: ServeOptions, model: str):
        self.queue, self.options, self.model = queue, options, model
        self.metrics, self._spelling = Metrics(queue), Spelling(queue.engine.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError: another model is requested."""
        if name not in (None, self.model):
            message = f"the model {name!r} does not exist; this server has {self.model!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _submissions(self, request: CompletionRequest | ChatRequest) -> list[dict[str, Any]]:
        """Arguments of `Queue.submit` for each answer: the samples of each prompt. May take long.

        Raises:
          RequestError: a request that cannot be served.
        """
        template, prompts, samples = isinstance(request, ChatRequest), request.prompts, request.n
        limit = min(self.options.max_choices, self.options.waiting)
        if len(prompts) * samples > limit:
            message = f"n: {len(prompts) * samples} answers are requested; this server gives at most {limit}"
            raise RequestError(message, param="n")
        try:
            encoded = [self.queue.encode(prompt, template=template) for prompt in prompts]
        except PromptError as error:
            # Clients see the name of the model, not its path.
            message = str(error).replace(str(self.queue.engine.target_name), self.model)
            code = TOO_LONG if isinstance(error, PromptTooLong) else None
            raise RequestError(message, param="messages" if template else "prompt", code=code) from None
        longest = max(map(len, encoded))
        if request.max_tokens is not None and longest + request.max_tokens > self.queue.capacity:
            message = (
                f"max_tokens: {longest} tokens of the prompt and {request.max_tokens} of its answer exceed the "
                f"{self.queue.capacity} tokens that this server has room for"
            )
            raise RequestError(message, param="max_tokens", code=TOO_LONG)
        options = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "ignore_eos")}
        options |= {
            "seed": secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS,
            "max_new_tokens": request.max_tokens or self.options.max_new_tokens,
            "stop": request.stop,
            "logprobs": request.best_tokens,
            "own_turn": template,
        }
        return [{"prompt": ids, "sequence": sample, **options} for ids in encoded for sample in range(samples)]

    async def answer(self, request: CompletionRequest | ChatRequest, http: Request) -> Response:
        """The answer to a request, whole or as a stream."""
        self.check_model(request.model)
        reply = Reply(self.model, request, self._spelling)
        answers = AnswerStream(self, http)
        try:
            await asyncio.to_thread(lambda: answers.submit(self._submissions(request)))
        except BaseException:
            answers.leave()
            raise
        if request.stream:
            leave = BackgroundTask(answers.leave)  # also if the stream never begins
            events = self._events(answers, reply, request)
            return StreamingResponse(events, 200, STREAM_HEADERS, "text/event-stream", leave)
        async for _ in answers.pieces():
            pass
        return JSONResponse(reply.whole(answers.finished))

    async def _events(self, answers: AnswerStream, reply: Reply, request: Any) -> AsyncIterator[bytes]:
        """Server-sent events."""

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"

        begun: set[int] = set()
        try:
            async for index, piece in answers.pieces():
                if piece.text or piece.logprobs or index not in begun:
                    yield event(reply.chunk(index, piece, first=index not in begun))
                    begun.add(index)
                if piece.finished is not None:
                    yield event(reply.end(index, piece.finished.finish_reason))
        except ClientDisconnect:
            return
        except RequestError as error:  # too late for a status
            self.metrics.stream_errors.labels(error.status).inc()
            yield event(error.body)
            return
        finally:
            answers.leave()
        if request.stream_options.include_usage:
            yield event(reply.usage(answers.finished))
        yield b"data: [DONE]\n\n"
