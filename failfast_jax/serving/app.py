"""The HTTP application: OpenAI's completions and chat completions, health and metrics, around a `Queue`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from failfast_jax import __version__
from failfast_jax.serving.answer_stream import Service
from failfast_jax.serving.openai_protocol import ChatRequest, CompletionRequest, RequestError, validation_error
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import ServeOptions

logger = logging.getLogger("failfast_jax")

ANSWERS = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
ERRORS = {status: {"description": "an error in OpenAI's shape"} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
CLOSE = {"Connection": "close"}


class Gate:
    """Wraps an application: statuses are counted, and a request's body and key are checked before its JSON.

    It answers its errors: a RequestError as that says, any other one with a 500 (after logging it), and a request that
    is cancelled because the server ends with a 503.

    Args:
      service: its options limit the length of a body, and its metrics count responses.
      key: that requests to `/v1` must bring; None: none is needed.
    """

    def __init__(self, app: ASGIApp, service: Service, key: str | None):
        self._app, self._most, self._key = app, service.options.max_body, key
        self._responses = service.metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, error = False, None

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._responses.labels(message["status"]).inc()
            await send(message)

        try:
            await self._enter(scope, receive, counted)
        except ClientDisconnect:
            return
        except RequestError as refused:
            error = refused
        except asyncio.CancelledError:  # of uvicorn's own task, which would log it
            error = None if started else RequestError("the server ends", status=503, **CLOSE)
        except Exception:
            if started:
                raise
            logger.exception("a request failed")
            error = RequestError("the server has failed; see its log", status=500, **CLOSE)
        if error is not None:
            response = JSONResponse(error.body, status_code=error.status, headers=error.headers)
            await response(scope, receive, counted)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        async for part in fastapi.Request(scope, receive).stream():
            body += part
            if len(body) > self._most:
                raise RequestError(f"the body has more than {self._most} bytes", status=413, **CLOSE)
        # Base URLs with a slash at their end give needless ones: /v1//models/ is /v1/models.
        path = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        if self._key is not None and f"{path}/".startswith("/v1/"):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time: the time of a wrong key must not depend on its correct part.
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
                message = "the API key is missing or wrong"
                raise RequestError(message, status=401, code="invalid_api_key", **{"WWW-Authenticate": "Bearer"})
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app({**scope, "path": path}, replay, send)


def build_app(queue: Queue, options: ServeOptions, model: str) -> fastapi.FastAPI:
    """Builds the ASGI application.

    Args:
      queue: open; the caller closes it.
      model: name of the model in the API.

    Raises:
      OptionError: see `ServeOptions.key`.
    """
    service, key = Service(queue, options, model), options.key()
    pages = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = fastapi.FastAPI(title="FailFast for JAX", version=__version__, **pages)
    app.add_middleware(Gate, service=service, key=key)
    if options.cors_origin is not None:
        origins = [origin.strip().rstrip("/") for origin in options.cors_origin.split(",")]
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
    info |= {"arithmetic": queue.engine.arithmetic, "parameter_bytes": queue.engine.parameter_bytes["target"]}

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
