"""The first stations of a request: statuses are counted, and its body, path and key are checked before its JSON."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from failfast_jax.serving.openai_protocol import RequestError

logger = logging.getLogger("failfast_jax")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_SECONDS = 30.0
"""Time limit of a request's body."""
CLOSE = {"Connection": "close"}


class Gate:
    """Wraps an application. It answers its errors: a RequestError as that says, any other one with a 500 (after logging
    it), and a request that is cancelled because the server ends with a 503.

    Args:
      most_bytes: maximum length of a body.
      on_status: called with the status of each response.
      check_key: called with the key of a request to `/v1`, None without one; may raise RequestError. None: no key is
        needed.
    """

    def __init__(
        self,
        app: Callable,
        most_bytes: int,
        on_status: Callable[[int], None],
        check_key: Callable[[str | None], None] | None,
    ):
        self._app, self._most, self._on_status, self._check_key = app, most_bytes, on_status, check_key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, error = False, None

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._on_status(message["status"])
            await send(message)

        try:
            await self._enter(scope, receive, counted)
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

    async def _enter(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await self._body(receive)
        if body is None:
            return
        # Base URLs with a slash at their end give needless ones: /v1//models/ is /v1/models.
        path = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        if self._check_key is not None and f"{path}/".startswith("/v1/"):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            self._check_key(key.strip() if scheme.lower() == "bearer" else None)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app({**scope, "path": path}, replay, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client leaves.

        Raises:
          RequestError: it is too long, or comes too slowly.
        """
        body, more = b"", True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._most:
                        raise RequestError(f"the body has more than {self._most} bytes", status=413, **CLOSE)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:.0f} seconds"
            raise RequestError(message, status=408, **CLOSE) from None
        return body
