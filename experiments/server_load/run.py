"""The server under attack: many clients that leave, read slowly or ask for nonsense, over an engine that fails.

    python -m experiments.server_load.run [--minutes 10] [--clients 200] [--seed 1] [settings of kvlab serve]

The engine is simulated on an H200, with a pool that is too small for the batch, a queue that fills, and passes and
requests that fail. Every five seconds every invariant of the pool is checked. Exit status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from experiments.server_load.clients import ENDS, Clients
from experiments.serving import ServerProcess, server_process
from kvlab.lab.machine import describe

LONG = 1_500  # tokens for clients that read slowly: more than the buffers between hold
PATIENCE_S = 12.0  # that such a client may read nothing
SETTINGS = [
    *("executor=simulated", "hardware=h200_sxm", "model=llama3_1_8b", "model.max_seq_len=2048"),
    *("executor.timing=roofline", "scheduler.max_batched_tokens=512"),
    *("kv.num_blocks=4000", "scheduler.max_batch_size=128", "scheduler.max_waiting_requests=40"),
    *("debug.faults.rate=0.01", "server.write_timeout_s=2", "server.max_waiting_outputs=200"),
]
VOCABULARY = 100_000
MEMORY_GROWTH = 0.02  # of the resident bytes in the second half, at most


@dataclass
class Outcome:
    """What was seen."""

    ends: Counter[str]
    findings: list[str]
    memory: list[float] = field(default_factory=list)  # MiB, every so often
    stats: dict[str, Any] = field(default_factory=dict)  # of the engine, at the end
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """Of the memory in the second half: its last quarter over its first, both as medians, less 1."""
        half = self.memory[len(self.memory) // 2 :]
        quarter = max(len(half) // 4, 1)
        return statistics.median(half[-quarter:]) / statistics.median(half[:quarter]) - 1


def attack(
    folder: Path,
    *,
    seconds: float,
    clients: int,
    seed: int,
    every_s: float,
    patience_s: float,
    settings: Sequence[str] = (),
) -> Outcome:
    """Run the attack, and look at what is left behind."""
    with server_process(folder, [*SETTINGS, *settings]) as server:
        outcome = asyncio.run(_attack(server, seconds, clients, seed, every_s, patience_s))
        deadline = time.monotonic() + 30
        while (stats := _get(server.url, "/stats"))["blocks_in_use"] or stats["running"] or stats["waiting"]:
            if time.monotonic() > deadline:
                outcome.findings.append(f"what nobody waits for any more is still here: {stats}")
                break
            time.sleep(0.05)
        outcome.stats = _get(server.url, "/stats")
        outcome.findings += _get(server.url, "/health?audit=true")["audit"]
    log = (folder / "server.log").read_text()
    if "Traceback" in log or "Exception" in log:
        outcome.findings.append(f"the server logged {log[-2_000:]}")
    return outcome


async def _attack(
    server: ServerProcess, seconds: float, clients: int, seed: int, every_s: float, patience_s: float
) -> Outcome:
    url, long = server.url, round(LONG * patience_s / PATIENCE_S)
    crowd, begun = Clients(url, seed, VOCABULARY, long, patience_s), time.monotonic()
    outcome = Outcome(crowd.ends, crowd.findings)
    running = [asyncio.create_task(crowd.run()) for _ in range(clients)]
    process = psutil.Process(server.pid)
    while (left := begun + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(every_s, left))
        outcome.memory.append(process.memory_info().rss / 2**20)
        health = await asyncio.to_thread(_get, url, "/health?audit=true")
        if health["status"] != "ready" or health["audit"]:
            crowd.findings.append(f"health: {health}")
    crowd.stop.set()
    await asyncio.gather(*running)
    outcome.seconds = time.monotonic() - begun
    return outcome


def _get(url: str, path: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:  # an audit with findings is a 503
        found = json.load(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}; seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = attack(
            Path(folder),
            seconds=60 * arguments.minutes,
            clients=arguments.clients,
            seed=arguments.seed,
            settings=arguments.settings,
            every_s=5.0,
            patience_s=PATIENCE_S,
        )
    if outcome.growth > MEMORY_GROWTH:
        outcome.findings.append(f"memory grew by {outcome.growth:.1%} in the second half")
    print(f"\n{sum(outcome.ends.values())} calls of {arguments.clients} clients in {outcome.seconds:.0f} s\n")
    print("| how it ended | calls |\n|---|---|")
    for end in ENDS:
        print(f"| {end} | {outcome.ends[end]} |")
    first, middle, last = (outcome.memory[place] for place in (0, len(outcome.memory) // 2, -1))
    print(f"\nEngine: {outcome.stats}")
    print(f"Memory: {first:.0f} MiB at first, {middle:.0f} half-way, {last:.0f} at the end", end="")
    print(f"; {outcome.growth:+.1%} in the second half")
    for finding in sorted(set(outcome.findings)):
        print(f"FOUND: {finding}")
    raise SystemExit(int(bool(outcome.findings)))


if __name__ == "__main__":
    main()
