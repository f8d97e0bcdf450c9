"""Static against continuous batching on the same requests, in the same memory.

    python -m experiments.policies.benchmark [overrides of python -m src.run] [--rounds 3]
                                             [--workloads mixed32 heavy_tail]

Throughput and time to the first token of each, and their factors: medians of rounds in which the two alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time

from experiments.runs import configure, measure
from kvlab.lab.machine import describe

_FIGURES = ("throughput/output_tokens_per_s", "latency/ttft_ms_p50", "latency/ttft_ms_p99", "latency/e2el_ms_p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--workloads", nargs="+", default=["mixed32", "heavy_tail"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{describe('cpu')}; medians of {arguments.rounds}, {time.strftime('%Y-%m-%d')}\n")
    print("| workload | policy | output tok/s | first token p50, s | first token p99, s | whole request p99, s |")
    print("|---|---|---|---|---|---|")
    for workload in arguments.workloads:
        medians: dict[str, list[float]] = {}
        runs: dict[str, list[dict[str, float]]] = {"static": [], "continuous": []}
        for _ in range(arguments.rounds):
            for policy, done in runs.items():
                overrides = [f"workload={workload}", f"scheduler={policy}", *arguments.overrides]
                done.append(measure(configure(overrides))[2])
        for policy, done in runs.items():
            medians[policy] = [statistics.median(run[figure] for run in done) for figure in _FIGURES]
            rate, *latencies = medians[policy]
            cells = " | ".join(f"{latency / 1000:.2f}" for latency in latencies)
            print(f"| {workload} | {policy} | {rate:.0f} | {cells} |", flush=True)
        static, continuous = medians["static"], medians["continuous"]
        factors = [continuous[0] / static[0], *(a / b for a, b in zip(static[1:], continuous[1:], strict=True))]
        cells = " | ".join(f"{factor:.2f}x better" for factor in factors)
        print(f"| {workload} | continuous is | {cells} |", flush=True)


if __name__ == "__main__":
    main()
