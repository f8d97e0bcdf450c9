"""What is checked of a call before it is read: its key, its size, its pace."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlab.config import parse_bytes
from kvlab.server.errors import ApiError
from kvlab.server.serving import Serving

# Need no key: who probes a server has none, and the page asks for it.
_OPEN = ("/", "/health", "/version")


class Limits:
    """ASGI middleware: answers 401 to a wrong key, 413 to too large a body, 408 to one that does not come."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        config = serving.config
        self._app = app
        self._serving = serving
        self._key = None if config.api_key is None else f"Bearer {config.api_key}".encode()
        self._most = parse_bytes(config.max_body, key="server.max_body")
        self._max_body = config.max_body
        self._timeout_s = config.read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._serving.open_calls += 1
        try:
            await self._call(scope, receive, send)
        finally:
            self._serving.open_calls -= 1

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:  # the client left
            return
        # Before the body is read as JSON and as tokens: clients count from here, too.
        scope.setdefault("state", {})["arrival_s"] = self._serving.engine.clock.now()
        await asyncio.sleep(0)  # those that came at the same time are told theirs before one is read
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _OPEN:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            raise ApiError(401, "a key is needed: send it as Authorization: Bearer KEY")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        length = headers.get(b"content-length", b"0")
        body = bytearray()
        if not length.isdigit() or int(length) > self._most:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._most:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError as error:
            text = f"the body did not come within server.read_timeout_s={self._timeout_s:g} seconds"
            raise ApiError(408, text) from error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than server.max_body={self._max_body}")
