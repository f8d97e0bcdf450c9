"""A client of the server that costs little itself: it counts the chunks of streams, and reads nothing of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit


class CountingStream(asyncio.Protocol):
    """One call whose answer is a stream; `done` is at the end the number of its chunks."""

    def __init__(self, body: dict[str, Any], path: str) -> None:
        data = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        self._chunks = 0
        self._last = b""
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._chunks += data.count(b"data: {")
        self._last = (self._last + data)[-40:]

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None or b"data: [DONE]" not in self._last:
            self.done.set_exception(RuntimeError(f"a stream ended early: {self._last!r} {exc or ''}"))
        else:
            self.done.set_result(self._chunks)


def _same(stream: CountingStream) -> CountingStream:
    return stream


async def _stream(url: str, bodies: Sequence[dict[str, Any]], path: str) -> list[int]:
    loop, server = asyncio.get_running_loop(), urlsplit(url)
    host, port = server.hostname or "", server.port or 80
    streams = [CountingStream(body, path) for body in bodies]
    await asyncio.gather(*(loop.create_connection(partial(_same, stream), host, port) for stream in streams))
    return list(await asyncio.gather(*(stream.done for stream in streams)))


def stream_at_once(url: str, bodies: Sequence[dict[str, Any]], path: str = "/v1/completions") -> list[int]:
    """Send all calls at once and read their streams to the end. Returns the number of chunks of each."""
    return asyncio.run(_stream(url, bodies, path))
