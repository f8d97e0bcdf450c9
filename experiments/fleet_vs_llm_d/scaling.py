"""The cost of a fleet's run against its number of replicas, at equal load for each.

python -m experiments.fleet_vs_llm_d.scaling [--router precise] [--most 256]
"""

from __future__ import annotations

import argparse
import time

from experiments.runs import configure
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.serve import make_engine

_EACH, _RATE = 24, 6  # requests of a replica, and how many of them a second
SETTINGS = (
    "executor=simulated",
    "hardware=h100_sxm",
    "model=qwen3_8b",
    "framework=vllm",
    "tracking=off",
    "figures=false",
    "workload=shared_prefix",
    "workload.arrival=poisson",
    "workload.group_len=2000",
    "workload.zipf=0",
)


def main() -> None:
    """Print a row for each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", default="precise")
    parser.add_argument("--most", type=int, default=256)
    options = parser.parse_args()
    print("| replicas | requests | steps | simulated s | CPU s | CPU ms a request | simulated s per CPU s |")
    print("|---|---|---|---|---|---|---|")
    for replicas in (1, 4, 16, 64, 256):
        if replicas > options.most:
            continue
        sizes = [f"fleet.replicas={replicas}", f"workload.num_requests={replicas * _EACH}"]
        sizes += [f"workload.rate={replicas * _RATE}", f"workload.num_groups={4 * replicas}"]
        plan = plan_run(configure([*SETTINGS, *sizes, f"fleet.router={options.router}"]))
        engine, begin = make_engine(plan, Profiler(enabled=False)), time.process_time()
        log = drive(engine, plan.requests)
        took = time.process_time() - begin
        print(
            f"| {replicas} | {len(log.records):,} | {len(log.steps):,} | {log.duration_s:.1f} | {took:.1f} "
            f"| {1000 * took / len(log.records):.1f} | {log.duration_s / took:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
