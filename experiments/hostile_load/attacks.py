"""Clients that try to stop a server: loops over its open paths, bodies of 8 MB, connections that send nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from urllib.parse import SplitResult, urlsplit

OPEN_PATHS = ("/health", "/health?audit=true", "/metrics", "/stats", "/version", "/v1/models", "/docs", "/")
BODY_BYTES = 8_000_000
SLOW_CONNECTIONS = 500
_LOOPS, _BODIES, _CALLS = 8, 2, 4  # clients of a kind at once
_TIMEOUT_S = 60.0

Attack = Callable[[SplitResult, Counter[str]], Coroutine[None, None, None]]


async def ask(server: SplitResult, path: str, body: bytes | None = None) -> int:
    """The status of one call. TimeoutError after a minute, OSError if the connection is lost."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {server.netloc}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(server.hostname, server.port or 80)
        try:
            writer.write(head.encode() + b"\r\n" + (body or b""))
            status = int((await reader.readline()).split()[1])
            while await reader.read(1 << 20):
                pass
            return status
        finally:
            writer.close()


async def _again(server: SplitResult, counts: Counter[str], calls: Iterator[tuple[str, bytes | None]]) -> None:
    while True:
        path, body = next(calls)
        try:
            counts[str(await ask(server, path, body))] += 1
        except (OSError, TimeoutError, IndexError, ValueError) as error:  # closed before, or without, an answer
            counts[type(error).__name__] += 1
            await asyncio.sleep(0.05)


async def _several(
    count: int, make: Callable[[int], Iterator[tuple[str, bytes | None]]], server: SplitResult, counts: Counter[str]
) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(_again(server, counts, make(number)))


def _open_paths(number: int) -> Iterator[tuple[str, bytes | None]]:
    return ((path, None) for path in itertools.cycle(OPEN_PATHS[number:] + OPEN_PATHS[:number]))


def _audits(_number: int) -> Iterator[tuple[str, bytes | None]]:
    return itertools.repeat(("/health?audit=true", None))


def _large_bodies(number: int) -> Iterator[tuple[str, bytes | None]]:
    """Millions of ids, of prompts and of messages, and one text."""
    text = b'{"prompt": "' + b"word " * (BODY_BYTES // 5) + b'"}'
    ids = b'{"prompt": [' + b"1," * (BODY_BYTES // 2) + b"1]}"
    prompts = b'{"prompt": [' + b"[1]," * (BODY_BYTES // 4) + b"[1]]}"
    message = b'{"role": "user", "content": "a"},'
    chats = b'{"messages": [' + (message * (BODY_BYTES // len(message)))[:-1] + b"]}"
    calls = [
        ("/v1/completions", text),
        ("/v1/completions", ids),
        ("/v1/completions", prompts),
        ("/v1/chat/completions", chats),
        ("/tokenize", text),
    ]
    return itertools.cycle(calls[number:] + calls[:number])


def _salts(number: int) -> Iterator[tuple[str, bytes | None]]:
    """Requests of one token, each under a salt of its own, of which every fourth is too long."""
    for count in itertools.count():
        salt = f"{number}-{count}-".ljust(BODY_BYTES if count % 4 == 0 else 1000, "s")
        yield "/v1/completions", json.dumps({"prompt": [1, 2], "max_tokens": 1, "cache_salt": salt}).encode()


def _samples(number: int) -> Iterator[tuple[str, bytes | None]]:
    """Calls of as many samples as one may have."""
    draws = random.Random(number)
    while True:
        body = {"prompt": [[draws.randrange(99)]] * 16, "n": 128, "max_tokens": 4, "temperature": 1, "stream": True}
        yield "/v1/completions", json.dumps(body).encode()


async def _slow_connections(server: SplitResult, counts: Counter[str]) -> None:
    """Connections that send a byte of a header now and then, and come back when they are closed."""

    async def one() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection(server.hostname, server.port or 80)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
                for _ in range(100):
                    await asyncio.sleep(1)
                    writer.write(b"a")
                    await writer.drain()
                writer.close()
            except OSError:
                counts["closed"] += 1
                await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for _ in range(SLOW_CONNECTIONS):
            group.create_task(one())


#: What each kind of client does, until it is cancelled.
ATTACKS: dict[str, Attack] = {
    "open paths": partial(_several, _LOOPS, _open_paths),
    "audits": partial(_several, _LOOPS, _audits),
    "bodies of 8 MB": partial(_several, _BODIES, _large_bodies),
    "salts": partial(_several, _CALLS, _salts),
    "2,048 samples a call": partial(_several, _CALLS, _samples),
    "500 slow connections": _slow_connections,
}


def attack(url: str, names: list[str], seconds: float) -> dict[str, Counter[str]]:
    """All attacks of these names at once, for so long. Returns for each how its calls ended."""
    counts = {name: Counter[str]() for name in names}

    async def together() -> None:
        await asyncio.sleep(0 if names else seconds)
        tasks = [asyncio.create_task(ATTACKS[name](urlsplit(url), counts[name])) for name in names]
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=seconds)
        for task in pending:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()  # raises what ended it early

    asyncio.run(together())
    return counts
