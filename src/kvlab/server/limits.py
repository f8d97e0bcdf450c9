"""What is checked of a call before it is read: its key, its size, its pace."""

import asyncio
import hmac

from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlab.config import parse_bytes
from kvlab.errors import shown
from kvlab.server.errors import ApiError
from kvlab.server.reading import LARGE
from kvlab.server.serving import Serving

# Need no key: who probes a server has none, and the page asks for it. An audit does, since it takes engine time.
_OPEN = ("/", "/health", "/ping", "/version")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Limits:
    """ASGI middleware: answers 403 to another name than its own, 401 to a wrong key, 413 to too large a body,
    415 to one that is compressed, 408 to one that does not come.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        config = serving.config
        self._app = app
        self._serving = serving
        self._key = None if config.api_key is None else f"Bearer {config.api_key}".encode()
        self._most = parse_bytes(config.max_body, key="server.max_body")
        self._max_body = config.max_body
        self._timeout_s = config.read_timeout_s
        on_loopback = config.host in (*_LOOPBACK, "::1") or config.host.startswith("127.")
        names = {*_LOOPBACK, config.host, *map(str.lower, config.allowed_hosts)}
        self._hosts = names if on_loopback and "*" not in names else None  # None: any

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
            self._check_host(headers)
            self._check_key(scope, headers)
            # A compressed body may be of any size once it is unpacked.
            coding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
            if coding not in ("", "identity"):
                raise ApiError(415, f"Content-Encoding: {shown(coding)} is not read; send the body as it is")
            body = await self._body(headers, receive)
            if body is None:  # the client left
                return
            # Before the body is read as JSON and as tokens: clients count from here, too.
            state = scope.setdefault("state", {})
            state |= {"arrival_s": self._serving.engine.clock.now(), "body_bytes": len(body)}
            if len(body) > LARGE and b"json" in headers.get(b"content-type", b"").lower():
                body = await self._serving.large.read(scope["path"], body)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await asyncio.sleep(0)  # those that came at the same time are told theirs before one is read
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A page of another site may have its name resolve to this machine: its browser then names that site."""
        if self._hosts is None:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            text = f"Host: {shown(host)}: this server is called {names}; server.allowed_hosts adds other names"
            raise ApiError(403, text)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        is_open = scope["path"] in _OPEN and "audit" not in QueryParams(scope["query_string"])
        if self._key is None or is_open:
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
