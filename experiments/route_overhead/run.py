"""What does `kvlab route` add to a request's time, and does it lose any when a server is killed?

    python -m experiments.route_overhead.run [--seconds 20] [--rounds 3] [--router cache_aware]
    python -m experiments.route_overhead.run --minutes 10 [--router least_requests]

The first: as experiments.recorder_overhead does, 200 requests a second to a server, then through the proxy, in
turns. The second: 200 clients, each with a stream a second, before four servers, each of which is killed once and
begins again. A client's answer has to be whole and of one server, or have been cut behind its first byte.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

from experiments.recorder_overhead.run import RATE, measure, process, until_ready
from kvlab.lab.machine import describe

CLIENTS, CHUNKS, KILLS, PAUSE_S = 200, 8, 4, 0.02
PORTS, PROXY = (8941, 8942, 8943, 8944), 8945
SERVER = ("-m", "experiments.route_overhead.run", "serve")


def serve(port: int) -> None:
    """Streams that say whose they are, and of which server."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["prompt"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(CHUNKS):
            await response.write(f"data: {name} {port} {number}\n\n".encode())
            await asyncio.sleep(PAUSE_S)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, reuse_address=True)


def judged(name: str, status: int, got: bytes) -> str:
    """How a request ended: whole, cut behind its first byte, lost before it, or wrong."""
    if not got or status != 200:
        return "lost"
    *events, last = [event.removeprefix(b"data: ").decode() for event in got.split(b"\n\n")]
    whole = {(*(f"{name} {port} {number}" for number in range(CHUNKS)), "[DONE]") for port in PORTS}
    if tuple(events) in whole and not last:
        return "whole"
    return "cut" if any(each[: len(events)] == tuple(events) for each in whole) else "wrong"


async def ask(client: aiohttp.ClientSession, name: str, times: list[float]) -> str:
    got, status, begin = b"", 0, time.perf_counter()
    try:
        url = f"http://127.0.0.1:{PROXY}/v1/completions"
        async with client.post(url, json={"prompt": name, "stream": True}) as answer:
            status = answer.status
            async for part in answer.content.iter_any():
                if not got:
                    times.append((time.perf_counter() - begin) * 1000)
                got += part
    except aiohttp.ClientError:
        pass
    return judged(name, status, got)


async def storm(seconds: float, servers: dict[int, subprocess.Popen[bytes]]) -> None:
    for port in (*PORTS, PROXY):
        await until_ready(f"http://127.0.0.1:{port}")
    ends, times, numbers = Counter[str](), list[float](), itertools.count()
    latest = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(delay: float) -> None:
            await asyncio.sleep(delay)
            while time.perf_counter() < latest:
                begin = time.perf_counter()
                ends[await ask(client, f"request-{next(numbers)}", times)] += 1
                await asyncio.sleep(max(begin + 1 - time.perf_counter(), 0))

        async def kill() -> None:
            for number in range(KILLS):
                await asyncio.sleep(seconds / (2 * KILLS + 1))
                port = PORTS[number % len(PORTS)]
                os.kill(servers[port].pid, signal.SIGKILL)
                servers[port].wait()
                await asyncio.sleep(seconds / (2 * KILLS + 1))
                servers[port] = subprocess.Popen([sys.executable, *SERVER, str(port)])

        await asyncio.gather(kill(), *(one(number / CLIENTS) for number in range(CLIENTS)))
        async with client.get(f"http://127.0.0.1:{PROXY}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    print(f"{sum(ends.values())} requests in {seconds:.0f} s, {KILLS} servers killed and begun again: {dict(ends)}")
    print(f"first byte, ms: p50 {np.percentile(times, 50):.2f}, p99 {np.percentile(times, 99):.2f}")
    print("\n".join(line for line in lines if line.startswith(("kvlab:route_requests", "kvlab:route_ret"))))
    if ends["lost"] or ends["wrong"]:
        sys.exit(1)


def cpu_s(pid: int) -> float:
    """The processor's time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end(servers: dict[int, subprocess.Popen[bytes]]) -> None:
    for server in servers.values():
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--router", default="least_requests")
    parser.add_argument("--minutes", type=float, help="200 clients before four servers for so long")
    arguments = parser.parse_args()
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}, {arguments.router}\n")
    urls = [f"http://127.0.0.1:{port}" for port in PORTS[: 4 if arguments.minutes else 2]]
    route = ("-m", "kvlab.cli", "route", f"upstreams=[{','.join(urls)}]", f"fleet.router={arguments.router}")
    with ExitStack() as stack:
        if not arguments.minutes:
            for port in PORTS[:2]:
                stack.enter_context(process("-m", "experiments.recorder_overhead.run", "serve", str(port)))
        servers = {
            port: subprocess.Popen([sys.executable, *SERVER, str(port)]) for port in PORTS if arguments.minutes
        }
        stack.callback(end, servers)
        for url in urls:
            asyncio.run(until_ready(url))
        pid = stack.enter_context(process(*route, f"server.port={PROXY}"))
        if arguments.minutes:
            asyncio.run(storm(arguments.minutes * 60, servers))
        else:
            print("| answers | server, ms: p50, p99 | through the proxy | more |\n|---|---|---|---|")
            asyncio.run(until_ready(f"http://127.0.0.1:{PROXY}"))
            begin = cpu_s(pid)
            asyncio.run(measure(arguments.seconds, arguments.rounds, (PORTS[0], PROXY)))
            requests = 2 * arguments.rounds * int(RATE * arguments.seconds)
            print(f"\nthe proxy's processor time: {(cpu_s(pid) - begin) / requests * 1000:.2f} ms a request")


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1:2] == ["serve"] else main()
