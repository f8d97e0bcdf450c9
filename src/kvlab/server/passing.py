"""What a recorder and a proxy share: calls are passed on as they came, and answers as the server sent them."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import web

from kvlab.errors import ConfigError

LARGEST = 64 << 20  # bytes of a body
#: Of one connection, and none of the message that is passed on (RFC 9110, 7.6.1).
_OF_A_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host",
}  # fmt: skip
_KEPT_S = 4.0  # an idle connection: less than the 5 s of uvicorn, which would close it as a call is sent


def client_session(connect_s: float = 10.0) -> aiohttp.ClientSession:
    """What calls servers: it waits so long for a connection, and as long as it takes for an answer."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)


def called(
    client: aiohttp.ClientSession, upstream: str, request: web.Request, body: bytes
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """The server's answer to a client's request."""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_A_HOP}
    url = f"{upstream}{request.raw_path}"
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


def listening_at(host: str, port: int, key: str = "port") -> socket.socket:
    """A socket that listens there. Raises ConfigError, naming `key`, where that is not possible."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(key, port, f"{host} cannot be listened on: {error.strerror}") from error
