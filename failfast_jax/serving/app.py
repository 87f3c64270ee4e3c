"""The HTTP server: OpenAI's completions and chat completions, health and metrics, around a `Queue`."""

from __future__ import annotations

import functools
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from failfast_jax import __version__
from failfast_jax.errors import PromptError, PromptTooLong
from failfast_jax.serving.answer_stream import Exchange, Gone
from failfast_jax.serving.metrics import CountedResponses, Metrics
from failfast_jax.serving.middleware import BodyLimit, Door, refusal
from failfast_jax.serving.openai_protocol import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    Reply,
    RequestError,
    error_body,
    explained,
)
from failfast_jax.serving.request_queue import Queue
from failfast_jax.serving.serve_options import ServeOptions
from failfast_jax.serving.token_logprobs import Spelling

CLIENT_CLOSED = 499
"""Nginx' status for a client that went away; nobody sees it."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
TOO_LONG = "context_length_exceeded"


class _Events(StreamingResponse):
    """A stream whose rows are freed even if it never begins."""

    def __init__(self, exchange: Exchange, stream: AsyncIterator[bytes]):
        super().__init__(stream, media_type="text/event-stream", headers=STREAM_HEADERS)
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
        self.metrics, self._spelling = Metrics(queue), Spelling(queue.engine.tokenizer)
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
            said = "the API key is missing or wrong"
            raise RequestError(said, status=401, code="invalid_api_key", **{"WWW-Authenticate": "Bearer"})

    def check_model(self, name: str | None) -> None:
        """Raises RequestError: another model is asked for."""
        if name not in (None, self.model):
            said = f"the model {name!r} does not exist; this server has {self.model!r}"
            raise RequestError(said, status=404, param="model", code="model_not_found")

    def check_logprobs(self, request: CompletionRequest | ChatRequest) -> None:
        """Raises RequestError: log-probabilities are asked for that this server does not keep."""
        best, most = request.best_tokens, self.queue.logprobs
        if best is None or (most is not None and best <= most):
            return
        name = "top_logprobs" if isinstance(request, ChatRequest) and most is not None else "logprobs"
        kept = "none: it was started without --logprobs n" if most is None else f"at most {most} (--logprobs {most})"
        raise RequestError(f"{name}: this server keeps {kept}", param=name)

    def refusal(self, error: PromptError, param: str) -> RequestError:
        """A prompt's error as a client may see it: models have names there, and no paths."""
        said = str(error).replace(str(self.queue.engine.target_name), self.model)
        return RequestError(said, param=param, code=TOO_LONG if isinstance(error, PromptTooLong) else None)

    def asked(self, request: CompletionRequest | ChatRequest) -> list[dict[str, Any]]:
        """Arguments of `Queue.submit` for each answer: the samples of each prompt. May take a while.

        Raises:
          RequestError: a request that cannot be served.
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
        try:
            encoded = [self.queue.encode(prompt, template=template) for prompt in prompts]
        except PromptError as error:
            raise self.refusal(error, "messages" if template else "prompt") from None
        longest = max(map(len, encoded))
        if request.limit is not None and longest + request.limit > self.queue.capacity:
            raise RequestError(
                f"{longest} tokens of the prompt and {request.limit} of its answer exceed the {self.queue.capacity} "
                "tokens that this server has room for",
                param="max_tokens",
                code=TOO_LONG,
            )
        options = {
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_k": request.top_k or 0,
            "seed": secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS,
            "ignore_eos": bool(request.ignore_eos),
            "max_new_tokens": request.limit or self.options.max_new_tokens,
            "stop": request.stops,
            "logprobs": request.best_tokens,
            "own_turn": template,
        }
        return [{"prompt": ids, "sequence": sample, **options} for ids in encoded for sample in range(samples)]

    async def answer(self, request: CompletionRequest | ChatRequest, http: fastapi.Request) -> Response:
        """The answer to a request, whole or as a stream."""
        self.check_model(request.model)
        self.check_logprobs(request)
        reply = Reply(self.model, isinstance(request, ChatRequest), self._spelling, request.best_tokens)
        exchange = Exchange(self.queue, http, self.options.timeout)
        await exchange.submit(functools.partial(self.asked, request))
        prompts = exchange.choices // (request.n or 1)
        if request.stream:
            usage = request.stream_options is not None and bool(request.stream_options.include_usage)
            stream = self._events(exchange, reply, prompts if usage else 0)
            return _Events(exchange, stream)
        async with exchange:
            try:
                async for _, piece in exchange.pieces():
                    self._note(piece)
            except Gone:
                return Response(status_code=CLIENT_CLOSED)
        finished = [exchange.finished[index] for index in range(exchange.choices)]
        return JSONResponse(reply.whole(finished, prompts))

    def _note(self, piece: Any) -> None:
        if piece.finished is not None:
            self.metrics.finished(piece.finished)

    async def _events(self, exchange: Exchange, reply: Reply, usage: int) -> AsyncIterator[bytes]:
        """Server-sent events; `usage`: prompts, if the last one is to tell tokens."""

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"

        async with exchange:
            begun: set[int] = set()
            try:
                async for index, piece in exchange.pieces():
                    self._note(piece)
                    first, reason = index not in begun, piece.finished and piece.finished.finish_reason
                    if piece.text or piece.logprobs or first:
                        begun.add(index)
                        yield event(reply.chunk(index, piece, first=first))
                    if reason:
                        yield event(reply.end(index, reason))
            except Gone:
                return
            except RequestError as error:  # too late for a status
                self.metrics.failed(error.status)
                yield event(error_body(str(error), error.status, error.param, error.code))
                return
            if usage:
                yield event(reply.usage([exchange.finished[index] for index in range(exchange.choices)], usage))
            yield b"data: [DONE]\n\n"


def build_app(queue: Queue, options: ServeOptions, model: str) -> fastapi.FastAPI:
    """The ASGI application.

    Args:
      queue: open; the caller closes it.
      model: what the model is called in the API.

    Raises:
      OptionError: see `ServeOptions.key` and `ServeOptions.origins`.
    """
    service = Service(queue, options, model)
    pages = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = fastapi.FastAPI(title="FailFast for JAX", version=__version__, **pages)
    _add_middleware(app, service)
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

    @app.head("/health", include_in_schema=False)
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


def _add_middleware(app: fastapi.FastAPI, service: Service) -> None:
    """Adds what sees a request before its route does, the last one first."""
    app.add_middleware(Door, check_key=service.check_key if service.keyed else None)
    app.add_middleware(BodyLimit, most=service.options.max_body)
    app.add_middleware(CountedResponses, metrics=service.metrics)
    if origins := service.options.origins():
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["Retry-After"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **allowed)


def _add_error_handlers(app: fastapi.FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: fastapi.Request, error: RequestError) -> JSONResponse:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        said, param = explained(error.errors())
        return JSONResponse(error_body(said, 400, param), status_code=400)

    @app.exception_handler(HTTPException)
    async def http(_: fastapi.Request, error: HTTPException) -> JSONResponse:
        body = error_body(str(error.detail), error.status_code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
