"""Two ranks beside one process on the same cores, and what the simulator says of two such ranks.

    python -m experiments.tensor_parallel.run [--rounds N] [--layers N]

Qwen3 0.6B's shapes with random weights in bfloat16: 8 prompts of 64 tokens at once, 16 output tokens each. The ways
to compute it take turns. Simulated ranks have half of this machine's rates each, and a link as the exchange is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from experiments.runs import configure, measure
from kvlab.config import RunConfig
from kvlab.engine.ranks import RankGroup
from kvlab.lab.machine import CpuWatch, describe
from kvlab.lab.machine_rates import rates_here

WORK = (
    *("model=qwen3_0_6b", "executor.dtype=bfloat16", "tracking=off", "workload=burst16", "workload.num_requests=8"),
    *("workload.prompt_len={min: 64, max: 64}", "workload.output_len={min: 16, max: 16}", "kv.memory=256MiB"),
)
WAYS = {
    "one process, one thread": ("executor.threads=1",),
    "one process, two threads": ("executor.threads=2",),
    "two ranks, a thread each": ("executor.threads=1", "executor.tensor_parallel=2"),
}
FIGURES = {"first token, ms": "latency/ttft_ms_p50", "per output token, ms": "latency/tpot_ms_p50"}
HIDDEN, ROWS = 1024, (1, 8, 64, 512)  # numbers of a row that is exchanged, and how many rows
TIMES = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28, help="of the model, which has 28; fewer take less time")
    asked = parser.parse_args()
    rounds, work = asked.rounds, [*WORK, f"model.architecture.num_hidden_layers={asked.layers}"]
    watch = CpuWatch()
    print(f"{describe('cpu')}; {watch.busy_cores(2.0):.1f} cores busy with other work")
    print(f"{rounds} rounds, {asked.layers} layers\n")
    exchange = exchange_s()
    for rows, seconds in zip(ROWS, exchange, strict=True):
        print(f"the sum of {rows} x {HIDDEN} float32 over two ranks: {1e6 * seconds:,.0f} us")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    found["two ranks, simulated"] = [measure(simulated(work, exchange))[2]]
    for _ in range(rounds):
        for way, settings in WAYS.items():
            found[way].append(measure(configure([*work, *settings]))[2])
    print(f"\n| | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    for way, runs in found.items():
        print(f"| {way} | {' | '.join(spread([run[name] for run in runs]) for name in FIGURES.values())} |")


def spread(values: list[float]) -> str:
    """The median, and the least and the most of several."""
    middle = f"{statistics.median(values):,.0f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.0f} to {max(values):,.0f})"


def simulated(work: list[str], exchange: list[float]) -> RunConfig:
    """Two devices that share this machine. The simulator counts bytes of bfloat16, and ranks exchange float32."""
    free = ("framework.step_us=0", "framework.sequence_us=0", "framework.token_us=0", "executor.tensor_parallel=2")
    config = configure([*work, "executor=simulated", "executor.timing=roofline", "hardware=here", *free])
    rates, once = rates_here("bfloat16", 2), exchange[0]
    link = 2 * ROWS[-1] * HIDDEN / max(exchange[-1] - once, 1e-9)
    assert config.hardware is not None
    hardware = replace(
        config.hardware,
        bandwidth_gb_s=rates.read_bytes_per_s / 2e9,
        tflops={"bfloat16": (rates.product_flops_per_s or rates.flops_per_s) / 2e12},
        link_gb_s=link / 1e9,
        link_efficiency=1.0,
        collective_us=1e6 * once,
    )
    return replace(config, hardware=hardware)


def exchange_s() -> list[float]:
    """Seconds of a sum over two ranks of one thread each, for each of ROWS."""
    context = get_context("spawn")
    mine, its = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        processes = [context.Process(target=_exchange, args=(rank, meeting, its)) for rank in range(2)]
        for process in processes:
            process.start()
        seconds: list[float] = mine.recv()
        for process in processes:
            process.join()
    return seconds


def _exchange(rank: int, meeting: str, told: Connection) -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank, 2)
    group.meet(meeting, "cpu", 120.0)
    medians = []
    for _ in range(TIMES):  # until both run
        group.add(torch.zeros(ROWS[0], HIDDEN))
    for rows in ROWS:
        x, taken = torch.zeros(rows, HIDDEN), []
        for _ in range(TIMES):
            start = time.perf_counter()
            group.add(x)
            taken.append(time.perf_counter() - start)
        medians.append(statistics.median(taken))
    if rank == 0:
        told.send(medians)


if __name__ == "__main__":
    main()
