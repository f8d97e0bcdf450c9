"""A server's life: it listens before it loads, drains at the first signal, ends at the second."""

import asyncio
import errno
import gc
import math
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvlab.config.server import ServerConfig
from kvlab.engine.garbage import gc_frozen
from kvlab.errors import ConfigError
from kvlab.server.serving import Serving

# As in kvlab.engine.garbage, but all objects within minutes: each connection of asyncio is a reference cycle, and a
# server has no end at which those that have grown old would be collected.
_COLLECTIONS = (50_000, 5, 5)
_SEND_BUFFER = 1 << 16  # bytes that the kernel keeps for a client; left to itself, megabytes for a slow one


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens at the server's address. Raises ConfigError where that is not possible."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Where it is named, asyncio sends each chunk at once (TCP_NODELAY), not after the acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # of each connection
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("server.host", config.host, "is no address of this machine; 127.0.0.1 is") from error
        text = f"{error.strerror}; choose another one, or server.port=0 for any that is free"
        raise ConfigError("server.port", config.port, text) from error
    return listening


class BoundedConnection(H11Protocol):
    """Is cut when its client takes longer than `head_s` to send the head of a request, from its first byte on, or
    longer than `write_s` to read what it was sent.
    """

    head_s: float
    write_s: float
    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._timers = {}
        self._start("head", self.head_s)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        elif not self.transport.is_closing():
            self._start("head", self.head_s)

    def on_response_complete(self) -> None:
        """See uvicorn. The next request may be here already; if not, an idle connection has a timer of its own."""
        self._stop("head")
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn, which would keep a connection that it closes until all was read."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def pause_writing(self) -> None:
        """See asyncio."""
        super().pause_writing()
        self._start("write", self.write_s)

    def resume_writing(self) -> None:
        """See asyncio."""
        super().resume_writing()
        self._stop("write")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        for what in list(self._timers):
            self._stop(what)
        super().connection_lost(exc)

    def _start(self, what: str, seconds: float) -> None:
        """Cut the connection in so many seconds, unless that is decided already."""
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()


class Server(uvicorn.Server):
    """Serves until a signal: the first one lets open calls end and refuses new ones, the second ends at once."""

    def __init__(self, app: FastAPI, serving: Serving) -> None:
        config = serving.config
        limits = {"head_s": config.read_timeout_s, "write_s": config.write_timeout_s}
        super().__init__(
            uvicorn.Config(
                app,
                http=type("_Connection", (BoundedConnection,), limits),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=max(1, round(config.keep_alive_s)),
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        self.cut_calls = 0  # calls that were open at the end
        self._serving = serving
        self._latest = math.inf  # when the server ends, whatever is open

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. Python's garbage collector runs rarely up to the end, not from one burst of requests to the
        next: each change over would hold up the last chunks of a burst, by tenths of a second.
        """
        with gc_frozen():
            gc.set_threshold(*_COLLECTIONS)
            try:
                super().run(sockets)
            finally:
                self._serving.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        seconds = 0.0 if self._serving.draining else self._serving.config.drain_s
        self._serving.draining = True
        self._latest = time.monotonic() + seconds

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn: whether the server ends now, asked ten times per second."""
        if self._serving.draining and not self._serving.open_calls:
            return True
        if time.monotonic() >= self._latest:
            self.cut_calls = self._serving.open_calls
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # its call then ends as if the client had left
            return True
        return await super().on_tick(counter)


def serve(app: FastAPI, serving: Serving, listening: socket.socket) -> bool:
    """Serve until a signal ends it. Returns whether all calls had ended."""
    server = Server(app, serving)
    server.run(sockets=[listening])
    return not server.cut_calls
