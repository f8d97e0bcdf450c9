"""Clients of a server under attack: each call ends in exactly one way, or is a finding."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

#: How a call may end: answered in full, with an error event in a stream, 503, refused as a bad request that it was,
#: left by the client, cut because the client read too slowly.
ENDS = ("complete", "error event", "503", "400", "left", "cut")
_TIMEOUT_S = 120.0  # for a call; a server that is slower has lost it


class WrongAnswerError(Exception):
    """Something that must not happen."""


class Clients:
    """Calls of every kind, until `stop` is set. `vocabulary`: prompts are ids below it; `long_tokens`: of answers
    to clients that read slowly, which read nothing for up to `patience_s`.
    """

    def __init__(self, url: str, seed: int, vocabulary: int, long_tokens: int, patience_s: float) -> None:
        self._address = urlsplit(url)
        self._draws = random.Random(seed)
        self._vocabulary = vocabulary
        self._long = long_tokens
        self._patience_s = patience_s
        self.stop = asyncio.Event()
        self.ends: Counter[str] = Counter()
        self.findings: list[str] = []

    async def run(self) -> None:
        """One client: a call after another."""
        kinds = {"read": 60, "whole": 15, "leave": 15, "slow": 5, "bad": 5}
        while not self.stop.is_set():
            (kind,) = self._draws.choices(list(kinds), list(kinds.values()))
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    end = await self._call(kind)
            except TimeoutError:
                end = f"{kind}: no end within {_TIMEOUT_S:g} s"
            except (WrongAnswerError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                end = f"{kind}: {type(error).__name__}: {error}"
            self.ends[end] += 1
            if end not in ENDS:
                self.findings.append(end)
            if end == "503":
                await asyncio.sleep(self._draws.uniform(0.05, 0.5))

    def _body(self, kind: str) -> dict[str, Any]:
        draws = self._draws
        shared = random.Random(draws.randrange(8))  # beginnings that the prefix cache finds again
        prompt = [shared.randrange(self._vocabulary) for _ in range(draws.choice((0, 48)))]
        prompt += [draws.randrange(self._vocabulary) for _ in range(draws.randint(1, 60))]
        tokens = self._long if kind == "slow" else draws.randint(1, 48)
        samples = 4 if kind == "slow" else draws.choice((1, 1, 1, 2))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "n": samples}
        if kind == "bad":
            wrong = [("prompt", [10**7]), ("temperature", -1), ("max_tokens", 10**9), ("n", "two")]
            body |= dict([draws.choice(wrong)])
        if kind != "whole":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def _call(self, kind: str) -> str:
        body = self._body(kind)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        sent = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        reader, writer = await self._connect(small=kind == "slow")
        try:
            if kind == "leave" and self._draws.random() < 0.3:  # in the middle of its request
                writer.write(sent[: self._draws.randrange(len(sent))])
                await writer.drain()
                return "left"
            writer.write(sent)
            await writer.drain()
            if kind == "leave":
                await _some(reader, self._draws)
                return "left"
            if kind == "slow":
                await asyncio.sleep(self._draws.uniform(0, self._patience_s))
            status, headers = await _head(reader)
            answer = b"".join([part async for part in _parts(reader, headers)])
        except (ConnectionError, asyncio.IncompleteReadError):
            if kind == "slow":
                return "cut"
            raise
        finally:
            writer.transport.abort() if kind == "leave" else writer.close()
        return _judge(kind, body, status, headers, answer)

    async def _connect(self, *, small: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection; `small`: that keeps little of what the client has not read."""
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self._address.hostname, self._address.port))
        return await asyncio.open_connection(sock=connection, limit=2**12 if small else 2**16)


async def _some(reader: asyncio.StreamReader, draws: random.Random) -> None:
    """Read a part of an answer, or wait a little for none."""
    try:
        async with asyncio.timeout(draws.uniform(0, 1)):
            for _ in range(draws.randint(0, 20)):
                await reader.readline()
    except TimeoutError:
        pass


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


def _judge(kind: str, body: dict[str, Any], status: int, headers: dict[str, str], answer: bytes) -> str:
    """How a call ended. Raises WrongAnswerError where it must not end so."""
    if status == 503:
        _check("retry-after" in headers, "a 503 without Retry-After")
        _check(bool(json.loads(answer)["error"]["message"]), "a 503 without a message")
        return "503"
    if kind == "bad":
        _check(status == 400, f"status {status} for a bad request: {answer[:200]!r}")
        return "400"
    _check(status == 200, f"status {status}: {answer[:200]!r}")
    if not body.get("stream"):
        found = json.loads(answer)
        _check(all(choice["finish_reason"] == "length" for choice in found["choices"]), "a wrong finish reason")
        _check(found["usage"]["completion_tokens"] == body["n"] * body["max_tokens"], "tokens are missing")
        return "complete"
    *events, done, rest = answer.split(b"\n\n")
    _check((done, rest) == (b"data: [DONE]", b""), f"a stream ended with {done!r} {rest!r}")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    failed = [number for number, chunk in enumerate(chunks) if "error" in chunk]
    if failed:
        _check(failed == [len(chunks) - 1], "an error is not the last event")
        return "error event"
    *chunks, last = chunks
    _check(last["choices"] == [], "no usage at the end")
    _check(last["usage"]["completion_tokens"] == body["n"] * body["max_tokens"], "tokens are missing")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    _check(len(choices) == body["n"] * body["max_tokens"], f"{len(choices)} chunks")
    ends = sorted(choice["index"] for choice in choices if choice["finish_reason"])
    _check(ends == list(range(body["n"])), f"finish reasons of the choices {ends}")
    return "complete"


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongAnswerError(otherwise)
