"""Does a stream go on while other clients try to stop the server?

    python -m experiments.hostile_load.run [--seconds 60] [settings of kvlab serve]

Each attack alone for a sixth of the time, then all of them at once. Exit status 1 if a gap in the stream is longer
than a second, or the stream was lost.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import psutil

from experiments.hostile_load.attacks import ATTACKS, attack
from experiments.serving import ServerProcess, server_process
from kvlab.lab.machine import describe

LONGEST_GAP_S = 1.0
SETTINGS = ["model=qwen3_tiny", "kv.memory=64MiB", "scheduler.max_batch_size=48"]


@dataclass
class Watched:
    """A stream beside an attack, and what became of the server's memory. Times are in seconds."""

    tokens: int = 0
    longest_gap_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes of the server, one a second
    beside: int = 0  # most bytes of the processes that read for it
    ends: dict[str, Counter[str]] = field(default_factory=dict)  # of the attack's calls


def watch(server: ServerProcess, names: list[str], seconds: float) -> Watched:
    """Attack the server for so long, and read one stream after another meanwhile."""
    watched, stop, process = Watched(), threading.Event(), psutil.Process(server.pid)
    stream = threading.Thread(target=_stream, args=(server.url, watched, stop))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(int).result()  # has started
        stream.start()
        attacked = pool.submit(attack, server.url, names, seconds)
        while not attacked.done():
            watched.memory.append(process.memory_info().rss)
            watched.beside = max(watched.beside, sum(map(_memory, process.children(recursive=True))))
            time.sleep(1)
        watched.ends = attacked.result()
    stop.set()
    stream.join()
    return watched


def _stream(url: str, watched: Watched, stop: threading.Event) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True, "stream": True, "min_tokens": 1000}
    address = urlsplit(url)
    while not stop.is_set():
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                watched.lost.append(f"{answer.status} {answer.read(200)!r}")
                time.sleep(0.1)
                continue
            ended, last = False, None
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is not None:  # the first token may have waited behind others' requests
                        watched.longest_gap_s = max(watched.longest_gap_s, now - last)
                    watched.tokens += 1
                    last = now
                ended = ended or line.startswith(b"data: [DONE]")
                if stop.is_set():
                    return
            if not ended:
                watched.lost.append("a stream ended early")
        except OSError as error:
            watched.lost.append(str(error))
        finally:
            connection.close()


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a reader of bodies that has just ended
        return 0


def table(rows: dict[str, Watched]) -> str:
    """Attacks as Markdown."""
    columns = (
        "attack",
        "its calls",
        "tokens of the stream",
        "longest gap, ms",
        "memory, MiB: first, most, last",
        "beside",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, watched in rows.items():
        ends = sum(watched.ends.values(), Counter[str]())
        calls = ", ".join(f"{count:,} x {end}" for end, count in ends.most_common())
        sizes = [size >> 20 for size in watched.memory] or [0]
        memory = f"{sizes[0]}, {max(sizes)}, {sizes[-1]}"
        cells = (
            name,
            calls or "none ended",
            f"{watched.tokens:,}",
            f"{watched.longest_gap_s * 1e3:,.0f}",
            memory,
            watched.beside >> 20,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of the attacks together")
    options, settings = parser.parse_known_args()
    groups = {"none": list[str]()} | {name: [name] for name in ATTACKS} | {"all at once": list(ATTACKS)}
    with TemporaryDirectory() as folder, server_process(Path(folder), [*SETTINGS, *settings]) as server:
        rows = {
            name: watch(server, names, options.seconds / (1 if len(names) > 1 else len(ATTACKS)))
            for name, names in groups.items()
        }
    print(f"{describe('cpu')}\n")
    print(table(rows))
    bad = [name for name, row in rows.items() if row.lost or row.longest_gap_s > LONGEST_GAP_S]
    for name in bad:
        print(f"{name}: the longest gap is {rows[name].longest_gap_s:.2f} s; lost: {rows[name].lost[:3]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
