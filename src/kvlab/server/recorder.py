"""A recorder: passes an OpenAI server's traffic through as it is, and has it traced (docs/reference/trace.md).

What is on the way to a client is neither held back nor read. When the answer has ended, what was said and when its
parts came goes to a process beside (server/tracing.py).
"""

import asyncio
import json
import marshal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, replace

import aiohttp
from aiohttp import web

from kvlab.server.passing import application, begun, called, client_session, refusal, unreached
from kvlab.server.said import LEFT, Exchange
from kvlab.server.tracing import Progress, TraceSettings

_GENERATE = ("/v1/completions", "/v1/chat/completions")
_MOST_WAITING = 256 << 20  # bytes of exchanges that the process beside has not taken


class Trace:
    """The process that writes the trace, and how far it is."""

    def __init__(self, settings: TraceSettings) -> None:
        self.path, self.progress = settings.path, Progress()
        self._settings, self._sent, self._unsent, self._gone = settings, 0, 0, ""

    async def start(self) -> None:
        """Start the process. It has a session of its own: an interrupt from a terminal is not for it."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvlab.server.tracing", stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self._pipe.write(marshal.dumps(astuple(self._settings)))
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.progress = Progress(*json.loads(line))
        if not self._pipe.is_closing() or self.progress.seen < self._sent:
            self._gone = "the process that writes it has ended"

    def put(self, exchange: Exchange) -> None:
        """Have it traced, or count it as lost."""
        if self._gone or self._pipe.transport.get_write_buffer_size() > _MOST_WAITING:
            self._unsent += 1
        else:
            self._sent += 1
            self._pipe.write(marshal.dumps(astuple(exchange)))

    @property
    def lost(self) -> int:
        """Requests that are not in the trace and should be."""
        return self.progress.lost + self._unsent + (self._sent - self.progress.seen if self._gone else 0)

    @property
    def error(self) -> str | None:
        """Why the last of those that are lost is, if any."""
        behind = "it is too far behind" if self._unsent else ""
        return self._gone or self.progress.error or behind or None

    async def close(self) -> None:
        """Wait until all is written."""
        self._pipe.close()
        await self._following
        await self._process.wait()


class Recorder:
    """Passes calls to `upstream` on, and traces those that generate."""

    def __init__(self, settings: TraceSettings) -> None:
        self._begin = time.perf_counter()
        self._upstream, self.trace = settings.upstream, Trace(replace(settings, started=time.time()))

    def app(self) -> web.Application:
        """The application."""
        app = application()
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._pass)
        app.cleanup_ctx.append(self._life)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        self._client = client_session()
        await self.trace.start()
        yield
        await self.trace.close()
        await self._client.close()

    async def _health(self, request: web.Request) -> web.Response:
        """The upstream's status, and the trace's."""
        try:
            async with self._client.get(f"{self._upstream}/health") as answer:
                status = answer.status
        except aiohttp.ClientError:
            status = 502
        about = {"status": "ready" if status == 200 else "the upstream does not answer", "upstream": status}
        state = self.trace
        trace = {"path": state.path, "requests": state.progress.written, "lost": state.lost, "error": state.error}
        return web.json_response(about | {"trace": trace}, status=200 if status == 200 else 503)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        begin = time.perf_counter()
        body = await request.read()
        exchange = Exchange(request.path, body, begin - self._begin, request.headers.get("Authorization"))
        try:
            async with called(self._client, self._upstream, request, body) as answer:
                return await self._answer(request, answer, exchange, begin)
        except (aiohttp.ClientError, ConnectionError) as error:
            if not exchange.status:
                return refusal(502, f"the upstream {self._upstream} cannot be reached: {unreached(error)}")
            if request.transport is not None:
                request.transport.abort()  # so that a client that is there sees that the answer is cut
            return web.Response()
        except asyncio.CancelledError:  # the client has left; its call of the upstream ends with this
            exchange.status = exchange.status or LEFT
            raise
        finally:
            if request.path in _GENERATE and request.method == "POST":
                self.trace.put(exchange)

    @staticmethod
    async def _answer(
        request: web.Request, answer: aiohttp.ClientResponse, exchange: Exchange, begin: float
    ) -> web.StreamResponse:
        exchange.status = answer.status
        response = await begun(request, answer)
        async for part in answer.content.iter_any():
            await response.write(part)
            exchange.parts.append((time.perf_counter() - begin, part))
        await response.write_eof()
        exchange.is_whole = True
        return response
