"""The HTTP application: OpenAI's completions and chat completions, health and metrics, around a `Queue`."""

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
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from failfast_jax import __version__
from failfast_jax.errors import PromptError, PromptTooLong
from failfast_jax.serving.answer_stream import AnswerStream, ClientDisconnected, EventResponse
from failfast_jax.serving.logprobs import Spelling
from failfast_jax.serving.metrics import Metrics
from failfast_jax.serving.middleware import Gate
from failfast_jax.serving.openai_protocol import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    Reply,
    RequestError,
    validation_error,
)
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import ServeOptions

CLIENT_CLOSED = 499
"""Nginx' status for a client that went away; nobody sees it."""
TOO_LONG = "context_length_exceeded"
ANSWERS = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
ERRORS = {
    status: {"description": "an error in OpenAI's shape"} for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)
}


class Service:
    """Answers checked requests.

    Args:
      queue: open.
      options: of the server.
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

    def _check_logprobs(self, request: CompletionRequest | ChatRequest) -> None:
        best, most = request.best_tokens, self.queue.logprobs
        if best is None or (most is not None and best <= most):
            return
        name = "top_logprobs" if isinstance(request, ChatRequest) and most is not None else "logprobs"
        kept = "none: it was started without --logprobs n" if most is None else f"at most {most} (--logprobs {most})"
        raise RequestError(f"{name}: this server keeps {kept}", param=name)

    def _submissions(self, request: CompletionRequest | ChatRequest) -> list[dict[str, Any]]:
        """Arguments of `Queue.submit` for each answer: the samples of each prompt. May take long.

        Raises:
          RequestError: a request that cannot be served.
        """
        template, prompts, samples = isinstance(request, ChatRequest), request.prompts, request.n or 1
        most = min(self.options.max_choices, self.options.waiting)
        if len(prompts) * samples > most:
            message = f"n: {len(prompts) * samples} answers are requested; this server gives at most {most}"
            raise RequestError(message, param="n")
        try:
            encoded = [self.queue.encode(prompt, template=template) for prompt in prompts]
        except PromptError as error:
            # Clients see the name of the model, not its path.
            message = str(error).replace(str(self.queue.engine.target_name), self.model)
            code = TOO_LONG if isinstance(error, PromptTooLong) else None
            raise RequestError(message, param="messages" if template else "prompt", code=code) from None
        longest = max(map(len, encoded))
        if request.limit is not None and longest + request.limit > self.queue.capacity:
            message = (
                f"max_tokens: {longest} tokens of the prompt and {request.limit} of its answer exceed the "
                f"{self.queue.capacity} tokens that this server has room for"
            )
            raise RequestError(message, param="max_tokens", code=TOO_LONG)
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
        self._check_logprobs(request)
        reply = Reply(self.model, isinstance(request, ChatRequest), self._spelling, request.best_tokens)
        answers = AnswerStream(self.queue, http, self.options.timeout)
        await answers.submit(functools.partial(self._submissions, request))
        prompts = len(request.prompts)
        if request.stream:
            with_usage = request.stream_options is not None and request.stream_options.include_usage
            return EventResponse(answers, self._events(answers, reply, prompts if with_usage else 0))
        async with answers:
            try:
                async for _, piece in answers.pieces():
                    self.metrics.on_piece(piece)
            except ClientDisconnected:
                return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(reply.whole([answers.finished[index] for index in sorted(answers.finished)], prompts))

    async def _events(self, answers: AnswerStream, reply: Reply, usage_prompts: int) -> AsyncIterator[bytes]:
        """Server-sent events; for `usage_prompts` above 0 the last one reports the usage of so many prompts."""

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"

        async with answers:
            begun: set[int] = set()
            try:
                async for index, piece in answers.pieces():
                    self.metrics.on_piece(piece)
                    if piece.text or piece.logprobs or index not in begun:
                        yield event(reply.chunk(index, piece, first=index not in begun))
                        begun.add(index)
                    if piece.finished is not None:
                        yield event(reply.end(index, piece.finished.finish_reason))
            except ClientDisconnected:
                return
            except RequestError as error:  # too late for a status
                self.metrics.on_stream_error(error.status)
                yield event(error.body)
                return
            if usage_prompts:
                yield event(reply.usage([answers.finished[index] for index in sorted(answers.finished)], usage_prompts))
            yield b"data: [DONE]\n\n"


def build_app(queue: Queue, options: ServeOptions, model: str) -> fastapi.FastAPI:
    """Builds the ASGI application.

    Args:
      queue: open; the caller closes it.
      model: name of the model in the API.

    Raises:
      OptionError: see `ServeOptions.key` and `ServeOptions.origins`.
    """
    service, key = Service(queue, options, model), options.key()
    pages = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = fastapi.FastAPI(title="FailFast for JAX", version=__version__, **pages)

    def check_key(client_key: str | None) -> None:
        # In constant time: the time of a wrong key must not depend on its correct part.
        if client_key is None or not hmac.compare_digest(client_key.encode(), key.encode()):
            message = "the API key is missing or wrong"
            raise RequestError(message, status=401, code="invalid_api_key", **{"WWW-Authenticate": "Bearer"})

    app.add_middleware(
        Gate,
        most_bytes=options.max_body,
        on_status=service.metrics.on_status,
        check_key=None if key is None else check_key,
    )
    if origins := options.origins():
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["Retry-After"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **allowed)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        raise validation_error(error.errors())

    @app.exception_handler(HTTPException)
    async def http_error(_: fastapi.Request, error: HTTPException) -> JSONResponse:
        raise RequestError(str(error.detail), status=error.status_code, **(error.headers or {}))

    # The gate checks the key; this describes it to clients.
    _add_routes(app, service, [] if key is None else [fastapi.Depends(HTTPBearer(auto_error=False))])
    return app


def _add_routes(app: fastapi.FastAPI, service: Service, guards: list[Any]) -> None:
    v1 = fastapi.APIRouter(prefix="/v1", dependencies=guards, responses=ERRORS)
    queue = service.queue
    info = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "failfast-jax"}

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        """The only model of this server."""
        return {"object": "list", "data": [info]}

    @v1.get("/models/{name:path}")
    async def model_by_name(name: str) -> dict[str, Any]:
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
        """Reports whether requests are taken."""
        return JSONResponse({"status": "ok" if queue.healthy else "failed"}, status_code=200 if queue.healthy else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
