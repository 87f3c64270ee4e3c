"""Checks of a request before it is read: its path, its key, its size, and its time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from failfast_jax.serving.openai_protocol import RequestError, error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_SECONDS = 30.0
"""In which a request's body must have come."""


def refusal(error: RequestError) -> JSONResponse:
    """An error as the response to its request."""
    body = error_body(str(error), error.status, error.param, error.code)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


class Door:
    """Checks the key of a request to `/v1` before its JSON is read, and takes needless slashes from its path, which
    come from base URLs with one at the end: `/v1//models/` is `/v1/models`.

    Args:
      check_key: is given the key, or None where there is none, and may raise RequestError; None: no key is needed.
    """

    def __init__(self, app: Callable, check_key: Callable[[str | None], None] | None):
        self._app, self._check = app, check_key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
            scope = {**scope, "path": path}
            if self._check is not None and f"{path}/".startswith("/v1/"):
                scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
                try:
                    self._check(key.strip() if scheme.lower() == "bearer" else None)
                except RequestError as error:
                    await refusal(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads a request's body before anybody else sees it, up to `most` bytes."""

    def __init__(self, app: Callable, most: int):
        self._app, self._most = app, most

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._most:
                        await refuse(send, 413, f"the body has more than {self._most} bytes")
                        return
        except TimeoutError:
            await refuse(send, 408, f"the body did not come within {BODY_SECONDS:.0f} seconds")
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, again, send)


async def refuse(send: Send, status: int, message: str) -> None:
    """Answers with an error, and asks for the connection to be closed."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(message, status)).encode()})
