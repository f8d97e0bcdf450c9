"""A scripted server of OpenAI's protocol, in a thread: it answers at once, or fails as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

METRICS = """# HELP vllm:num_requests_running Sequences.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} {running}
vllm:num_requests_waiting{{model_name="m"}} 1.0
vllm:kv_cache_usage_perc{{model_name="m"}} 0.25
vllm:num_preemptions_total{{model_name="m"}} {answered}
vllm:prefix_cache_queries_total{{model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{model_name="m"}} 0.0
vllm:cache_config_info{{block_size="16",num_gpu_blocks="100"}} 1.0
"""


@dataclass
class Script:
    """How the server behaves."""

    version: str | None = "9.9"
    models: list[str] = field(default_factory=lambda: ["m"])
    max_model_len: int | None = 1000
    tells_ids: bool = True
    tokens_per_event: int = 1
    usage: str = "continuous"  # continuous, end or none
    most_tokens: int | None = None  # it ends sooner than asked
    has_metrics: bool = True
    refuses: str | None = None  # a field that it does not take
    key: str | None = None
    after: int = 10**9  # answers before it ends, hangs or breaks off
    then: str = ""  # end, hang, stall (which answers nobody any more), break or error
    bodies: list[dict[str, Any]] = field(default_factory=list)  # what it was asked


class FakeServer:
    """One running server."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.loop = asyncio.new_event_loop()
        self.server: asyncio.Server | None = None
        self.port = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.running, self.polls = 0, 0  # requests, and how often it was asked for its metrics
        self.stalls = self.was_left = False  # and by a client meanwhile

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", self.port, limit=2**24)
        self.port = self.server.sockets[0].getsockname()[1]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n")[0].split(" ")
                lines = [line.partition(": ") for line in head.split("\r\n")[1:]]
                headers = {name.lower(): value for name, _, value in lines}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.stalls |= self.script.then == "stall" and method == "POST"
                if self.stalls:
                    self.script.bodies += [json.loads(body)] if method == "POST" else []
                    await reader.read()  # until its client leaves
                    self.was_left |= method == "POST"
                    raise OSError
                if method == "POST":
                    await self.complete(json.loads(body), writer)
                else:
                    self.answer(writer, *self.page(path, headers.get("authorization")))
                await writer.drain()
        self.open.discard(writer)
        writer.close()

    def page(self, path: str, key: str | None) -> tuple[int, str]:
        script = self.script
        if script.key is not None and key != f"Bearer {script.key}":
            return 401, json.dumps({"error": {"message": "no key"}})
        if path == "/v1/models":
            cards = [{"id": name, "max_model_len": script.max_model_len} for name in script.models]
            return 200, json.dumps({"object": "list", "data": cards})
        if path == "/version" and script.version is not None:
            return 200, json.dumps({"version": script.version})
        if path == "/metrics" and script.has_metrics:
            self.polls += 1
            answered = len(script.bodies)
            queries = sum(len(body["prompt"]) for body in script.bodies)
            return 200, METRICS.format(running=self.running, answered=answered, queries=queries)
        return 404, "not found"

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        script = self.script
        script.bodies.append(body)
        if script.refuses is not None and script.refuses in body:
            error = {"error": {"message": f"Unrecognized request argument supplied: {script.refuses}"}}
            self.answer(writer, 400, json.dumps(error))
            return
        failing = script.then if len(script.bodies) > script.after else ""
        if failing == "end":
            self.stop()
            raise OSError
        if failing == "error":
            self.answer(writer, 500, json.dumps({"error": {"message": "CUDA out of memory"}}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if failing == "hang":
            await asyncio.sleep(600)  # longer than any client waits
        self.running += 1
        wanted = body["max_tokens"] if script.most_tokens is None else min(body["max_tokens"], script.most_tokens)
        for start in range(0, wanted, script.tokens_per_event):
            ids = list(range(start, min(wanted, start + script.tokens_per_event)))
            choice: dict[str, Any] = {"index": 0, "text": "x" * len(ids)}
            choice["finish_reason"] = "length" if ids[-1] == wanted - 1 else None
            if script.tells_ids and body.get("return_token_ids"):
                choice["token_ids"] = ids
            event: dict[str, Any] = {"choices": [choice]}
            if script.usage == "continuous" and body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = {"completion_tokens": ids[-1] + 1}
            self.event(writer, event)
            await asyncio.sleep(0)
            if failing == "break":
                self.running -= 1
                raise OSError
        if script.usage != "none":
            self.event(writer, {"choices": [], "usage": {"completion_tokens": wanted}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self.running -= 1

    @staticmethod
    def answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    @staticmethod
    def event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def stop(self) -> None:
        """End it as a crash does: every connection breaks off."""
        if self.server is not None:
            self.server.close()
        for writer in self.open:
            writer.transport.abort()

    async def end(self) -> None:
        self.stop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def endpoint(**script: Any) -> Iterator[FakeServer]:
    """A server that runs while the block does."""
    server = FakeServer(Script(**script))
    loop = server.loop
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.run_until_complete(server.end())
        loop.close()
