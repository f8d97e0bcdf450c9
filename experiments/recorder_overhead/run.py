"""What does `kvlab record` add to a request's time, at 200 requests a second?

    python -m experiments.recorder_overhead.run [--seconds 20] [--rounds 3] [--sustain 600]

A server that answers at once, the recorder and the client are a process each. Requests come evenly, first to the
server, then through the recorder, in turns; a chat has 400 tokens, a stream 8 chunks. Of each round p50 and p99, of
those the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from kvlab.lab.machine import describe

RATE, FAST, CHUNKS = 200, 500, 8
TEXT = "words of a prompt that is neither short nor long " * 40
BODIES = {
    "whole": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8},
    "streamed": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "stream": True},
}


async def answer(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    if not asked.get("stream"):
        usage = {"prompt_tokens": 400, "completion_tokens": 8}
        message = {"role": "assistant", "content": "eight tokens of an answer"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(CHUNKS):
        choice = {
            "index": 0,
            "delta": {"content": "word "},
            "finish_reason": "stop" if number == CHUNKS - 1 else None,
        }
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def serve() -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None)


@contextmanager
def process(*command: str) -> Iterator[int]:
    """A process, and its number."""
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    try:
        yield running.pid
    finally:
        running.terminate()
        running.wait(30)


async def until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for _ in range(200):
            try:
                async with client.get(f"{url}/health") as found:
                    if found.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise RuntimeError(f"{url} does not come up")


async def load(url: str, body: object, seconds: float, rate: int = RATE) -> list[float]:
    """Milliseconds of each request, from when it was to be sent."""
    found: list[float] = []
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        begin = time.perf_counter() + 0.1

        async def one(at: float) -> None:
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            sent = time.perf_counter()
            async with client.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
                await response.read()
            found.append((time.perf_counter() - sent) * 1000)

        await asyncio.gather(*(one(begin + number / rate) for number in range(int(rate * seconds))))
    return found


async def measure(seconds: float, rounds: int, ports: tuple[int, int]) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for url in urls:
        await until_ready(url)
    for name, body in BODIES.items():
        found: list[list[Any]] = [[], []]
        for _ in range(rounds):  # in turns
            for place, url in enumerate(urls):
                times = (await load(url, body, seconds))[RATE // 2 :]  # connections are open then
                found[place].append(np.percentile(times, [50, 99]))
        (p50, p99), (q50, q99) = (np.median(each, axis=0) for each in found)
        cells = (name, f"{p50:.2f}, {p99:.2f}", f"{q50:.2f}, {q99:.2f}", f"{q50 - p50:+.2f}, {q99 - p99:+.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def resident_mib(pid: int) -> float:
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    statuses = [Path(f"/proc/{each}/status").read_text() for each in (pid, *children)]
    return sum(int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) for status in statuses) / 1024


async def sustain(seconds: float, url: str, pid: int) -> None:
    await until_ready(url)
    for part in range(5):
        times = await load(url, BODIES["whole"], seconds / 5, FAST)
        found = f"{np.percentile(times, 50):.2f}, {np.percentile(times, 99):.2f}"
        print(f"| {seconds * (part + 1) / 5:.0f} | {found} | {resident_mib(pid):.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sustain", type=float, metavar="S", help="500 a second through the recorder for so long")
    arguments = parser.parse_args()
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}\n")
    with tempfile.TemporaryDirectory() as folder:
        trace, ports = Path(folder, "trace.jsonl"), (8931, 8932)
        upstream = f"upstream=http://127.0.0.1:{ports[0]}"
        record = ("-m", "kvlab.cli", "record", upstream, f"port={ports[1]}", f"to={trace}")
        with process("-m", "experiments.recorder_overhead.run", "serve", str(ports[0])), process(*record) as pid:
            if arguments.sustain:
                print("| after s | ms: p50, p99 | the recorder's memory, MiB |\n|---|---|---|")
                asyncio.run(sustain(arguments.sustain, f"http://127.0.0.1:{ports[1]}", pid))
                expected = 5 * int(FAST * arguments.sustain / 5)
            else:
                print("| answers | server, ms: p50, p99 | through the recorder | more |\n|---|---|---|---|")
                asyncio.run(measure(arguments.seconds, arguments.rounds, ports))
                expected = 2 * arguments.rounds * int(RATE * arguments.seconds)
        print(f"\n{len(trace.read_text().splitlines()) - 1} of {expected} requests are in the trace")


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["serve"] else main()
