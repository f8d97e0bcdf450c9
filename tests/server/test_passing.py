"""What the recorder and the proxy share: how they end, and what they make of odd requests."""

from __future__ import annotations

import gzip
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from aiohttp import web

from features.steps.recorder_steps import recorder_before
from features.steps.upstream import Upstream, listening
from kvlab.cli import record, route
from kvlab.config.values import address
from kvlab.errors import ConfigError
from kvlab.server import passing
from tests.support.commands import Command, call
from tests.support.serving import wait_until


def routed(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], ask: Callable[[str], None], *settings: str
) -> Command:
    """`kvlab route` in this thread before a server that answers so, and a client of it in another."""
    app, urls, listened = web.Application(), list[str](), passing.listening_at
    app.router.add_get("/v1/models", models)
    app.router.add_route("*", "/v1/{path:.*}", handler)

    def listen(host: str, port: int, key: str) -> socket.socket:
        found = listened(host, port, key)
        urls.append(address(*found.getsockname()[:2]))
        return found

    def asking() -> None:
        wait_until(lambda: bool(urls) and signal.getsignal(signal.SIGTERM) is not before)
        try:
            ask(urls[0])
        except BaseException:
            terminate()  # else the command would wait for a signal
            raise

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, listening(app) as url, ThreadPoolExecutor(1) as pool:
        patch.setattr(passing, "listening_at", listen)
        asked = pool.submit(asking)
        ended = call(route.main, f"upstreams={url}", "server.port=0", *settings)
        asked.result(30)
    return ended


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 130)])
def test_the_first_signal_lets_an_answer_end_and_the_second_does_not(signals: int, code: int) -> None:
    upstream, got = Upstream("in a stream that pauses"), list[bytes]()

    def ask(url: str) -> None:
        body = {"prompt": "a", "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
                parts = answer.iter_bytes()
                got.append(next(parts))
                terminate()
                wait_until(lambda: not reachable(url))
                if signals == 2:
                    terminate()
                else:
                    upstream.goes_on.set()
                got.extend(parts)
        except httpx.HTTPError:
            got.append(b"cut")
        finally:
            upstream.goes_on.set()

    ended = routed(upstream.answer, ask)
    assert (ended.code, got[-1] == b"cut") == (code, signals == 2)
    assert "Traceback" not in ended.output


def reachable(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health"))
    except httpx.HTTPError:
        return False


def test_odd_requests(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies in gzip go through as they came, and a target with an address to the upstream. What is too large is
    refused in OpenAI's form, what is no HTTP without a traceback in the log.
    """
    seen, refused = list[tuple[str, bytes]](), list[httpx.Response]()
    monkeypatch.setattr(passing, "LARGEST", 10_000)
    zipped = gzip.compress(b'{"prompt": "a"}')

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.raw_path, await request.read()))
        return web.Response()

    def ask(url: str) -> None:
        httpx.post(f"{url}/v1/completions", content=zipped, headers={"Content-Encoding": "gzip"})
        for text in ("GET http://127.0.0.1:9/v1/a?b=1 HTTP/1.1\r\n", "GET @127.0.0.1 HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(f"{text}Host: x\r\nConnection: close\r\n\r\n".encode())
                while connection.recv(1000):
                    pass
        refused.append(httpx.post(f"{url}/v1/completions", content=b"a" * 20_000))
        terminate()

    with caplog.at_level(logging.WARNING):
        assert routed(answer, ask).code == 0
    assert seen == [("/v1/completions", b'{"prompt": "a"}'), ("/v1/a?b=1", b"")]
    assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (413, 413)
    assert not caplog.records


@pytest.mark.parametrize(
    ("main", "settings", "sentence"),
    [
        (
            route.main,
            ("server.host=nowhere.invalid",),
            "server.host=nowhere.invalid: is no address of this machine",
        ),
        (record.main, ("host=203.0.113.1",), "host=203.0.113.1: is no address of this machine"),
        (record.main, ("host=[::1]",), "host=[::1]: is no address of this machine"),
        (
            record.main,
            ("port={port}",),
            "port={port}: Address already in use; choose",
        ),
    ],
)
def test_an_address_that_is_not_to_be_had(
    main: Callable[[], None], settings: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        given = [f"upstreams={url}"] if main is route.main else [f"upstream={url}", f"to={tmp_path / 'a'}"]
        ended = call(main, *given, *(text.format(port=port) for text in settings))
    assert (ended.code, ended.output.startswith(f"error: {sentence.format(port=port)}")) == (2, True), ended.output


def test_an_address_of_ipv6() -> None:
    try:
        listening_there = passing.listening_at("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listening_there as found:
        assert address(*found.getsockname()[:2]) == f"http://[::1]:{found.getsockname()[1]}"


def test_why_requests_were_lost_is_told_to_the_end(tmp_path: Path) -> None:
    """Not that the process beside has ended, nor nothing, as others were written since."""
    with ExitStack() as stack:
        recorded = recorder_before(stack, tmp_path, "in whole")
        trace = recorded.recorder.trace
        Path(trace.path).mkdir()
        recorded.ask("completion")
        wait_until(lambda: trace.lost == 1)
        Path(trace.path).rmdir()
        recorded.ask("completion")
        wait_until(lambda: trace.progress.written == 1)
    assert (trace.lost, trace.error) == (1, "Is a directory")
