"""kvlab and llama.cpp on the same requests in turns, with one thread each, beside whatever else the machine does.

    python -m experiments.engine_comparison.turns [--model qwen3_0_6b] [--rounds 3] [--sides kvlab "llama.cpp BF16"]
                                                  [--settings engine.python=ENVIRONMENT/bin/python]

Every engine is loaded once and stays; in each round it serves the same requests as the others, which are new ones.
Prints output tokens per second of wall time and of its process's own CPU time, which others on the machine change
less: medians of the rounds, and how many times a figure kvlab's is with the same weights (medians of ratios).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from experiments.runs import configure
from kvlab.config import RunConfig
from kvlab.engine.build import build_engine
from kvlab.engine.protocol import ServingEngine
from kvlab.lab.machine import describe
from kvlab.lab.run.drive import drive
from kvlab.lab.run.peer_plan import plan_peer
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.requests import requests_of

SETTINGS = [
    *("executor=cpu", "executor.threads=1", "executor.dtype=bfloat16", "model.max_seq_len=1024", "kv.memory=1GiB"),
    *("scheduler.max_batch_size=16", "scheduler.max_batched_tokens=1024", "figures=false"),
]
#: Settings of each engine, and the side of kvlab's whose weights take as many bits.
SIDES: dict[str, tuple[list[str], str]] = {
    "kvlab": ([], "kvlab"),
    "kvlab int8": (["executor.weights=int8"], "kvlab int8"),
    "llama.cpp BF16": (["engine=llamacpp"], "kvlab"),
    "llama.cpp F16": (["engine=llamacpp", "+engine.options={weights: F16, type_k: 1, type_v: 1}"], "kvlab"),
    "llama.cpp Q8_0": (["engine=llamacpp_q8"], "kvlab int8"),
}
LOADS = {
    "burst16, short": ["workload=burst16", "workload.prompt_len=48", "workload.output_len=12"],
    "one stream": [
        "workload=burst16",
        "workload.num_requests=1",
        "workload.prompt_len=16",
        "workload.output_len=24",
    ],
    "prompts of 512": [
        "workload=burst16",
        "workload.num_requests=2",
        "workload.prompt_len=512",
        "workload.output_len=1",
    ],
}


class Turn(NamedTuple):
    """Tokens per second: those that were asked for, or of prompts where one alone was asked for."""

    wall: float
    cpu: float


def start(config: RunConfig, folder: Path) -> tuple[ServingEngine, psutil.Process]:
    """An engine, and the process that computes."""
    before = psutil.Process().children()
    peer = plan_peer(config)
    if peer is None:
        return build_engine(plan_run(config)), psutil.Process()
    engine = peer.start(folder, lambda: False)
    (process,) = [child for child in psutil.Process().children() if child not in before]
    return engine, process


def turn(engine: ServingEngine, process: psutil.Process, config: RunConfig, number: int) -> Turn:
    """Serve the load's requests of a round."""
    requests = [
        replace(request, request_id=f"{number}-{request.request_id}")
        for request in requests_of(replace(config, seed=number))
    ]
    began, spent = time.perf_counter(), _cpu_s(process)
    log = drive(engine, requests)
    wall, cpu = time.perf_counter() - began, _cpu_s(process) - spent
    if log.completed != len(requests):
        raise RuntimeError("a request has failed")
    asked = sum(request.sampling.max_tokens for request in requests)
    tokens = asked if asked > len(requests) else sum(len(request.prompt_token_ids) for request in requests)
    return Turn(tokens / wall, tokens / cpu)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(found: dict[str, dict[str, list[Turn]]]) -> str:
    """Markdown: a row for each load and engine."""
    rows = ["| load | engine | tok/s | tok/s of CPU time | kvlab is, wall | kvlab is, CPU time |", "|---" * 6 + "|"]
    for load, sides in found.items():
        for side, turns in sides.items():
            own = sides.get(SIDES[side][1], [])
            cells = [f"{statistics.median(each):.1f}" for each in zip(*turns, strict=True)]
            for field in Turn._fields if side != SIDES[side][1] else ():
                ratios = [getattr(o, field) / getattr(t, field) for o, t in zip(own, turns, strict=False)]
                cells.append(
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
                )
            rows.append(f"| {load} | {side} | {' | '.join([*cells, '', ''][:4])} |")
    return "\n".join(rows)


def measure(model: str, sides: Sequence[str], loads: Sequence[str], rounds: int, others: Sequence[str]) -> str:
    """The table of all rounds; one before them is not counted."""
    found: dict[str, dict[str, list[Turn]]] = {load: {side: [] for side in sides} for load in loads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        running = {}
        for side in sides:
            config = configure([f"model={model}", *SETTINGS, *LOADS[loads[0]], *SIDES[side][0], *others])
            running[side] = start(config, Path(folder, side))
            engines.enter_context(closing(running[side][0]))
        configs = {load: configure([f"model={model}", *SETTINGS, *LOADS[load]]) for load in loads}
        for number in range(rounds + 1):
            for load, config in configs.items():
                for side, (engine, process) in running.items():
                    turned = turn(engine, process, config, 1000 * (number + 1) + [*loads].index(load))
                    print(f"round {number}, {load}, {side}: {turned.wall:.2f}, {turned.cpu:.2f}", flush=True)
                    if number:
                        found[load][side].append(turned)
    return table(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=[*SIDES])
    parser.add_argument("--loads", nargs="+", default=[*LOADS], choices=[*LOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], help="of kvlab run")
    given = parser.parse_args()
    found = measure(given.model, given.sides, given.loads, given.rounds, given.settings)
    print(f"\n{given.model}, {describe('cpu')}, {time.strftime('%Y-%m-%d')}\n\n{found}")


if __name__ == "__main__":
    main()
