"""What a recorder and a proxy share: calls are passed on as they came, and answers as the server sent them."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import AddrInfoType, web
from aiohttp.http_exceptions import HttpProcessingError

from kvlab.errors import ConfigError, shown

LARGEST = 64 << 20  # bytes of a body
#: Of one connection, and none of the message that is passed on (RFC 9110, 7.6.1).
_OF_A_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host",
}  # fmt: skip
_DRAIN_S = 60.0  # that open calls have to end after a signal
_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # of a silent connection, seconds
_KEPT_S = 4.0  # an idle connection: less than the 5 s of uvicorn, which would close it as a call is sent


def client_session(connect_s: float = 10.0) -> aiohttp.ClientSession:
    """What calls servers: it waits so long for a connection, and as long as it takes for an answer."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S, socket_factory=_probed)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)


def _probed(address: AddrInfoType) -> socket.socket:
    """A socket that breaks off when the other machine is gone: such a one closes nothing."""
    found = socket.socket(*address[:3])
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # Linux
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def unreached(error: Exception) -> str:
    """Why a server was not reached, in a few words."""
    is_of_tls = isinstance(error, aiohttp.ClientSSLError)  # whose numbers are none of the system's
    if isinstance(error, aiohttp.ClientConnectorError) and not is_of_tls and (error.os_error.errno or 0) > 0:
        return f"Cannot connect: {os.strerror(error.os_error.errno or 0)}"
    return shown(error) or type(error).__name__


def called(
    client: aiohttp.ClientSession, upstream: str, request: web.Request, body: bytes
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """The server's answer to a client's request."""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_A_HOP}
    url = f"{upstream}{request.rel_url.raw_path_qs}"  # not the address of a server, which a client may send too
    return client.request(request.method, url, data=body, headers=headers, allow_redirects=False)


async def begun(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """The answer to the client, which has the server's status and headers, and is to get its parts."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in _OF_A_HOP:
            response.headers.add(name, value)
    await response.prepare(request)
    return response


def refusal(status: int, message: str) -> web.Response:
    """An error of our own, in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    about = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": about}, status=status)


def application() -> web.Application:
    """An application whose own refusals are in OpenAI's form."""
    return web.Application(client_max_size=LARGEST, middlewares=[_refusing])


@web.middleware
async def _refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return refusal(413, f"the body is larger than {LARGEST >> 20} MiB, the most that is passed on")
    except web.HTTPException as error:
        return refusal(error.status, f"{request.method} {request.path}: {error.reason}")


def listening_at(host: str, port: int, key: str = "port") -> socket.socket:
    """A socket that listens there. Raises ConfigError, naming `key`, where that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        number = error.errno or 0
        if number <= 0 or number == errno.EADDRNOTAVAIL:  # no such name, or that of another machine
            name = key.removesuffix("port") + "host"
            raise ConfigError(name, host, "is no address of this machine; 127.0.0.1 is") from error
        text = f"{os.strerror(number)}; choose another one, or {key}=0 for any that is free"
        raise ConfigError(key, port, text) from error


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether what is logged is no mistake of a client, who is told it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


async def serve(app: web.Application, listening: socket.socket) -> bool:
    """Serve until a signal. The first one lets open calls end, for a minute; the second one ends at once. Returns
    whether all calls had ended.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    # Bodies are passed on as they came, those in gzip too.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=2 * _DRAIN_S
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    signals = asyncio.Semaphore(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.release)
    await signals.acquire()
    ending, again = asyncio.create_task(runner.cleanup()), asyncio.create_task(signals.acquire())
    await asyncio.wait({ending, again}, timeout=_DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    have_ended = ending.done()
    if not have_ended and runner.server is not None:
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()  # its call then ends as if the client had left
    await ending
    return have_ended
