"""The HTTP server: OpenAI's completions and chat completions, health and metrics, around a `Queue`."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from failfast_jax import __version__
from failfast_jax.errors import PromptError
from failfast_jax.serving.exchange import Exchange, Gone
from failfast_jax.serving.limits import BodyLimit
from failfast_jax.serving.metrics import Metrics
from failfast_jax.serving.options import ServeOptions
from failfast_jax.serving.protocol import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    Reply,
    RequestError,
    error_body,
)
from failfast_jax.serving.queue import Queue

logger = logging.getLogger("failfast_jax")

CLIENT_CLOSED = 499
"""Nginx' status for a client that went away; nobody sees it."""


class _Events(StreamingResponse):
    """A stream whose rows are freed even if it never begins."""

    def __init__(self, exchange: Exchange, stream: AsyncIterator[bytes]):
        super().__init__(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exchange = exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.leave()


class Service:
    """What the routes share.

    Args:
      queue: open.
      options: of the server.
      model: what the model is called.
    """

    def __init__(self, queue: Queue, options: ServeOptions, model: str):
        self.queue, self.options, self.model = queue, options, model
        self.metrics = Metrics(queue)
        self.created = int(time.time())
        self._key = options.key()

    @property
    def keyed(self) -> bool:
        """Whether requests must bring a key."""
        return self._key is not None

    def check_key(self, given: str | None) -> None:
        """Raises RequestError: the key is missing or wrong."""
        # In constant time: how long a wrong key takes must not tell how much of it is right.
        if given is None or not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    def check_model(self, name: str | None) -> None:
        """Raises RequestError: another model is asked for."""
        if name not in (None, self.model):
            said = f"the model {name!r} does not exist; this server has {self.model!r}"
            raise RequestError(said, status=404, param="model", code="model_not_found")

    def asked(self, request: CompletionRequest | ChatRequest) -> list[dict[str, Any]]:
        """Arguments of `Queue.submit` for each answer: the samples of each prompt. May take a while.

        Raises:
          RequestError, PromptError: a request that cannot be served.
        """
        prompts: list[Any]
        if isinstance(request, ChatRequest):
            prompts, template = [[message.plain for message in request.messages]], True
        else:
            prompts, template = request.prompts, False
        samples = request.n or 1
        most = min(self.options.max_choices, self.options.waiting)
        if len(prompts) * samples > most:
            said = f"{len(prompts) * samples} answers are asked for; at most {most} are given"
            raise RequestError(said, param="n")
        encoded = [self.queue.encode(prompt, template=template) for prompt in prompts]
        longest = max(map(len, encoded))
        if request.limit is not None and longest + request.limit > self.queue.capacity:
            raise RequestError(
                f"{longest} tokens of the prompt and {request.limit} of its answer exceed the {self.queue.capacity} "
                "tokens that this server has room for",
                param="max_tokens",
                code="context_length_exceeded",
            )
        options = {
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_k": request.top_k or 0,
            "seed": secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS,
            "ignore_eos": request.ignore_eos,
            "max_new_tokens": request.limit or self.options.max_new_tokens,
            "stop": request.stops,
        }
        return [{"prompt": ids, "sequence": sample, **options} for ids in encoded for sample in range(samples)]

    async def answer(self, request: CompletionRequest | ChatRequest, http: fastapi.Request) -> Response:
        """The answer to a request, whole or as a stream."""
        self.check_model(request.model)
        try:
            asked = await fastapi.concurrency.run_in_threadpool(self.asked, request)
        except PromptError as error:
            raise RequestError(str(error)) from None
        chat = isinstance(request, ChatRequest)
        prompts = len(asked) // (request.n or 1)
        reply, exchange = Reply(self.model, chat), Exchange(self.queue, http, self.options.timeout)
        await exchange.submit(asked)
        if request.stream:
            usage = request.stream_options is not None and request.stream_options.include_usage
            stream = self._events(exchange, reply, len(asked), prompts if usage else 0)
            return _Events(exchange, stream)
        async with exchange:
            try:
                async for _, piece in exchange.pieces():
                    self._note(piece)
            except Gone:
                return Response(status_code=CLIENT_CLOSED)
        finished = [exchange.finished[index] for index in range(len(asked))]
        return JSONResponse(reply.whole(finished, prompts))

    def _note(self, piece: Any) -> None:
        if piece.finished is not None:
            self.metrics.finished(piece.finished)

    async def _events(self, exchange: Exchange, reply: Reply, choices: int, usage: int) -> AsyncIterator[bytes]:
        """Server-sent events; `usage`: prompts, if the last one is to tell tokens."""

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"

        async with exchange:
            begun: set[int] = set()
            try:
                async for index, piece in exchange.pieces():
                    self._note(piece)
                    first, reason = index not in begun, piece.finished and piece.finished.finish_reason
                    if piece.text or first:
                        begun.add(index)
                        yield event(reply.chunk(index, piece.text or "", first=first))
                    if reason:
                        yield event(reply.chunk(index, "", reason=reason))
            except Gone:
                return
            except RequestError as error:  # too late for a status
                yield event(error_body(str(error), error.status, error.param, error.code))
                return
            if usage:
                yield event(reply.usage([exchange.finished[index] for index in range(choices)], usage))
            yield b"data: [DONE]\n\n"


def build_app(queue: Queue, options: ServeOptions, model: str) -> fastapi.FastAPI:
    """The ASGI application.

    Args:
      queue: open; the caller closes it.
      model: what the model is called in the API.

    Raises:
      OptionError: see `ServeOptions.key`.
    """
    service = Service(queue, options, model)
    app = fastapi.FastAPI(title="FailFast for JAX", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, most=options.max_body)
    _add_error_handlers(app)
    bearer = HTTPBearer(auto_error=False)

    def key(credentials: HTTPAuthorizationCredentials | None = fastapi.Depends(bearer)) -> None:  # noqa: B008
        service.check_key(None if credentials is None else credentials.credentials)

    problems = {status: {"description": "an error in OpenAI's shape"} for status in ERRORS}
    guards = [fastapi.Depends(key)] if service.keyed else []
    v1 = fastapi.APIRouter(prefix="/v1", dependencies=guards, responses=problems)
    info = {"id": model, "object": "model", "created": service.created, "owned_by": "failfast-jax"}

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [info]}

    @v1.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """A model by its name."""
        service.check_model(name)
        return info

    @v1.post("/completions", response_model=None, responses=ANSWERS)
    async def completions(body: CompletionRequest, request: fastapi.Request) -> Response:
        """Texts that continue prompts as they are."""
        return await service.answer(body, request)

    @v1.post("/chat/completions", response_model=None, responses=ANSWERS)
    async def chat_completions(body: ChatRequest, request: fastapi.Request) -> Response:
        """The next turn of a conversation."""
        return await service.answer(body, request)

    app.include_router(v1)

    @app.get("/health", responses={503: {"description": "the engine has failed"}})
    async def health() -> JSONResponse:
        """Whether requests are taken."""
        return JSONResponse({"status": "ok" if queue.healthy else "failed"}, status_code=200 if queue.healthy else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


ANSWERS = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


def _add_error_handlers(app: fastapi.FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: fastapi.Request, error: RequestError) -> JSONResponse:
        body = error_body(str(error), error.status, error.param, error.code)
        return JSONResponse(body, status_code=error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        said = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            said = "no such argument is served"
        name, colon, _ = said.partition(":")
        param = place or (name if colon else None)
        return JSONResponse(error_body(f"{place}: {said}" if place else said, 400, param), status_code=400)

    @app.exception_handler(HTTPException)
    async def http(_: fastapi.Request, error: HTTPException) -> JSONResponse:
        body = error_body(str(error.detail), error.status_code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: fastapi.Request, error: Exception) -> JSONResponse:
        logger.error("unexpected: %r", error)
        return JSONResponse(error_body("the server has failed; see its log", 500), status_code=500)
