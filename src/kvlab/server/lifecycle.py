"""A server's life: it listens before it loads, drains at the first signal, ends at the second."""

from __future__ import annotations

import asyncio
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


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens at the server's address. Raises ConfigError where that is not possible."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Where it is named, asyncio sends each chunk at once (TCP_NODELAY), not after the acknowledgement.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((config.host, config.port))
    except socket.gaierror as error:
        found.close()
        raise ConfigError("server.host", config.host, "is no address of this machine; 127.0.0.1 is") from error
    except OSError as error:
        found.close()
        text = f"{error.strerror}; choose another one, or server.port=0 for any that is free"
        raise ConfigError("server.port", config.port, text) from error
    return found


class HeadTimeout(H11Protocol):
    """Cuts a connection that takes longer than `seconds` to send the head of a request, from its first byte on."""

    seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        is_served = self.cycle is not None and not self.cycle.response_complete
        if self._timer is not None and is_served:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and not is_served and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def on_response_complete(self) -> None:
        """See uvicorn. The next request may be here already; if not, an idle connection has a timer of its own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Serves until a signal: the first one lets open calls end and refuses new ones, the second ends at once."""

    def __init__(self, app: FastAPI, serving: Serving) -> None:
        config = serving.config
        super().__init__(
            uvicorn.Config(
                app,
                http=type("_HeadTimeout", (HeadTimeout,), {"seconds": config.read_timeout_s}),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=max(1, round(config.keep_alive_s)),
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        self._serving = serving
        self._latest = 0.0

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. Python's garbage collector runs rarely up to the end, not from one burst of requests to the
        next: each change over would hold up the last chunks of a burst, by tenths of a second.
        """
        with gc_frozen():
            super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        if self._serving.draining:
            self.should_exit = self.force_exit = True
        self._serving.draining = True
        self._latest = time.monotonic() + self._serving.config.drain_s

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn: whether the server ends now, asked ten times per second."""
        done = not self._serving.open_calls or time.monotonic() > self._latest
        return await super().on_tick(counter) or (self._serving.draining and done)


def serve(app: FastAPI, serving: Serving, listening: socket.socket) -> bool:
    """Serve until a signal ends it. Returns whether all calls had ended."""
    server = Server(app, serving)
    server.run(sockets=[listening])
    return not server.force_exit
