"""What does `kvlab route` add to a request's time, and does it lose any when a server is killed?

    python -m experiments.route_overhead.run [--seconds 20] [--rounds 3] [--router cache_aware]
    python -m experiments.route_overhead.run --minutes 10 [--clients 200] [--router least_requests]

The first: as experiments.recorder_overhead does, 200 requests a second to a server, then through the proxy, in
turns. The second: 200 clients, each with one stream after the other, before four servers, each of which is killed
once and begins again. A client's answer has to be whole and of one server, or have been cut behind its first byte,
and the proxy's metrics have to count what the clients saw. Beside them, twice a second, a request for one part goes
to a server and through the proxy, in turns: the difference of the medians is what the proxy adds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
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

CHUNKS, KILLS, PAUSE_S, LOOK_S = 8, 4, 0.5, 0.25
PORTS, PROXY = (8941, 8942, 8943, 8944), 8945
SERVER = ("-m", "experiments.route_overhead.run", "serve")


def serve(port: int) -> None:
    """Streams that say whose they are, and of which server."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(asked["max_tokens"]):
            await asyncio.sleep(PAUSE_S if number else 0)
            await response.write(f"data: {asked['prompt']} {port} {number}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, reuse_address=True)


def judged(name: str, parts: int, status: int, got: bytes) -> str:
    """How a request ended: whole, cut behind its first byte, lost before it, or wrong."""
    if not got or status != 200:
        return "lost"
    *events, last = [event.removeprefix(b"data: ").decode() for event in got.split(b"\n\n")]
    whole = {(*(f"{name} {port} {number}" for number in range(parts)), "[DONE]") for port in PORTS}
    if tuple(events) in whole and not last:
        return "whole"
    return "cut" if any(each[: len(events)] == tuple(events) for each in whole) else "wrong"


async def ask(client: aiohttp.ClientSession, port: int, name: str, parts: int, times: list[float]) -> str:
    """Ask for so many parts, and note the milliseconds until the first byte."""
    got, status, begin = b"", 0, time.perf_counter()
    try:
        url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": name, "max_tokens": parts, "stream": True}
        async with client.post(url, json=body) as answer:
            status = answer.status
            async for part in answer.content.iter_any():
                if not got:
                    times.append((time.perf_counter() - begin) * 1000)
                got += part
    except aiohttp.ClientError:
        pass
    return judged(name, parts, status, got)


def counted(page: str, name: str) -> list[int]:
    """A metric of the proxy, of each upstream."""
    found = re.findall(rf'kvlab:route_{name}{{upstream="[^"]*:(\d+)"}} (\S+)', page)
    return [int(float(value)) for _, value in sorted(found)]


async def storm(seconds: float, clients: int, servers: dict[int, subprocess.Popen[bytes]]) -> None:
    for port in (*PORTS, PROXY):
        await until_ready(f"http://127.0.0.1:{port}")
    ends, times, numbers = Counter[str](), list[float](), itertools.count()
    direct, through = list[float](), list[float]()
    latest = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(delay: float) -> None:
            await asyncio.sleep(delay)
            while time.perf_counter() < latest:
                ends[await ask(client, PROXY, f"request-{next(numbers)}", CHUNKS, times)] += 1

        async def look() -> None:
            for number in itertools.count():
                await asyncio.sleep(LOOK_S)
                if time.perf_counter() >= latest:
                    return
                name = f"request-{next(numbers)}"
                if number % 2:
                    ends[await ask(client, PROXY, name, 1, through)] += 1
                else:
                    await ask(client, PORTS[number // 2 % len(PORTS)], name, 1, direct)

        async def kill() -> None:
            for number in range(KILLS):
                await asyncio.sleep(seconds / (2 * KILLS + 1))
                port = PORTS[number % len(PORTS)]
                os.kill(servers[port].pid, signal.SIGKILL)
                servers[port].wait()
                await asyncio.sleep(seconds / (2 * KILLS + 1))
                servers[port] = subprocess.Popen([sys.executable, *SERVER, str(port)])

        spread_s = CHUNKS * PAUSE_S / clients
        await asyncio.gather(kill(), look(), *(one(number * spread_s) for number in range(clients)))
        async with client.get(f"http://127.0.0.1:{PROXY}/metrics") as answer:
            page = await answer.text()
    requests = sum(ends.values())
    print(f"{requests} requests in {seconds:.0f} s, {KILLS} servers killed and begun again: {dict(ends)}")
    print(f"first byte, ms: p50 {np.percentile(times, 50):.2f}, p99 {np.percentile(times, 99):.2f}")
    (a50, a99), (b50, b99) = (np.percentile(each, [50, 99]) for each in (direct, through))
    print(f"one part, ms: server p50 {a50:.2f}, p99 {a99:.2f}; through the proxy p50 {b50:.2f}, p99 {b99:.2f}")
    print(f"the proxy adds {b50 - a50:.2f} ms in the median of {len(through)}")
    sent, again, broken, left = (
        counted(page, name) for name in ("requests_total", "retries_total", "broken_total", "in_flight")
    )
    print(f"by server: sent {sent}, of them again to another {again}, broken {broken}")
    is_counted = (sum(sent) - sum(again), sum(broken), sum(left)) == (requests, ends["cut"], 0)
    if ends["lost"] or ends["wrong"] or not is_counted:
        sys.exit("requests were lost or wrong, or the proxy's metrics are not what the clients saw")


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
    parser.add_argument("--minutes", type=float, help="clients before four servers for so long")
    parser.add_argument("--clients", type=int, default=200)
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
            begin = cpu_s(pid)
            asyncio.run(storm(arguments.minutes * 60, arguments.clients, servers))
            print(f"the proxy's processor time: {cpu_s(pid) - begin:.1f} s")
        else:
            print("| answers | server, ms: p50, p99 | through the proxy | more |\n|---|---|---|---|")
            asyncio.run(until_ready(f"http://127.0.0.1:{PROXY}"))
            begin = cpu_s(pid)
            asyncio.run(measure(arguments.seconds, arguments.rounds, (PORTS[0], PROXY)))
            requests = 2 * arguments.rounds * int(RATE * arguments.seconds)
            print(f"\nthe proxy's processor time: {(cpu_s(pid) - begin) / requests * 1000:.2f} ms a request")


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1:2] == ["serve"] else main()
