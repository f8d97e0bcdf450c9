"""Servers of a few lines, behind the recorder and the proxies."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp import web

PROMPT = "A prompt that nobody should find again in a trace, long enough for more than one block of its tokens"


WHOLE = {
    "choices": [{"index": 0, "text": "An answer", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 26, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}},
}


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": "An"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": " answer"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}},
]


PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions", "list": "/v1/models"}


@contextmanager
def listening(app: web.Application) -> Iterator[str]:
    """The address of an application that runs in a thread."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), list[str]()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append("http://{}:{}".format(*runner.addresses[0][:2]))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@dataclass
class Upstream:
    """A server that answers in one way."""

    kind: str
    sent: bytes = b""
    asked_for_tokens_by: str | None = None
    was_left: bool | None = None  # whether its client had left when a stream went on
    goes_on: threading.Event = field(default_factory=threading.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if "stream" in self.kind:
            return await self._stream(request)
        status, body, content = 200, json.dumps(self._whole()), "application/json"
        if self.kind == "with an error":
            status, body = 400, '{"error": {"message": "no"}}'
        elif self.kind == "with HTML":
            body, content = "<html>A proxy's page</html>", "text/html"
        self.sent = gzip.compress(body.encode()) if "gzip" in self.kind else body.encode()
        headers = {"Content-Encoding": "gzip"} if "gzip" in self.kind else {}
        return web.Response(body=self.sent, status=status, content_type=content, headers=headers)

    def _whole(self) -> dict[str, Any]:
        count = next((int(word) for word in self.kind.split() if word.isdecimal()), 0)
        if not count and "data:" not in self.kind:
            return WHOLE
        text = "a line of data: and a blank one" if "data:" in self.kind else ""
        cut = 2 if "cut" in self.kind else 0
        choices = [
            {"index": index, "text": text * (index + 1), "finish_reason": "length" if index < cut else "stop"}
            for index in range(count or 1)
        ]
        return {"choices": choices, "usage": {"completion_tokens": 3 * count or 7}}

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked_for_tokens_by = request.headers.get("Authorization")
        assert (await request.json())["messages"][0]["content"] == PROMPT
        return web.json_response({"count": 40, "tokens": list(range(40))})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, chunk in enumerate([*CHUNKS, None]):
            if number == 1 and "breaks" in self.kind:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == 1 and "pauses" in self.kind:
                await asyncio.to_thread(self.goes_on.wait, 30)
                self.was_left = request.transport is None
            data = b"data: " + (b"[DONE]" if chunk is None else json.dumps(chunk).encode()) + b"\n\n"
            if "CR LF" in self.kind:
                data = b": ping\r\n\r\n" + data.replace(b"\n", b"\r\n")
            self.sent += data
            await response.write(data)
        return response


@contextmanager
def listening_in_http_1_0(upstream: Upstream) -> Iterator[str]:
    """The address of a server of HTTP/1.0, which ends an answer by closing its connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            upstream.sent = json.dumps(WHOLE).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(upstream.sent)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
