"""kvlab and other engines on the same requests, as one sweep: `kvlab run -m engine=... workload=... repeats=...`.

    python -m experiments.engine_comparison.run [--engines kvlab vllm transformers_static] [--rounds 5]
                                                [--workloads burst16 burst48 long8] [--directory FOLDER]
                                                [--settings engine.python=ENVIRONMENT/bin/python ...]

Every run is a process of its own, and engines take turns in each round. Prints output tokens per second, medians of
the rounds, and how many times a figure kvlab's is: the median of the ratios of each round. `kvlab report FOLDER
by=engine` compares all metrics, with intervals.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kvlab.lab.machine import describe
from kvlab.lab.records import RunRecord, read_sweep

SETTINGS = [
    "model=qwen3_0_6b",
    "model.max_seq_len=4096",
    "executor=cpu",
    "executor.dtype=bfloat16",
    "kv.memory=3GiB",
    "kv.prefix_sharing=false",
    "scheduler.max_batch_size=48",
    "scheduler.max_batched_tokens=1024",
    "figures=false",
    "tracking=off",
]
RATE = "throughput/output_tokens_per_s"
OWN = "kvlab"


def run(engines: Sequence[str], workloads: Sequence[str], rounds: int, folder: Path, others: Sequence[str]) -> None:
    """The sweep. A point that fails is in its files; the others run."""
    swept = [f"engine={','.join(engines)}", f"workload={','.join(workloads)}", f"repeats={rounds}"]
    command = [sys.executable, "-m", "kvlab.cli", "run", "-m", *swept, *SETTINGS, *others]
    subprocess.run([*command, f"hydra.sweep.dir={folder}"], check=False)


def table(runs: Sequence[RunRecord]) -> str:
    """Markdown: a row for each workload and engine; of each round what finished."""
    found: dict[str, dict[str, dict[object, float]]] = defaultdict(lambda: defaultdict(dict))
    for each in runs:
        if each.finished:
            repeat = each.config.get("repeat", 0)
            found[each.choices["workload"]][each.choices["engine"]][repeat] = each.metrics[RATE]
    rows = ["| workload | engine | output tok/s | of each round | kvlab is |", "|---|---|---|---|---|"]
    for workload, engines in found.items():
        own = engines.get(OWN, {})
        for engine, rates in engines.items():
            ratios = [own[repeat] / rate for repeat, rate in rates.items() if repeat in own]
            times = f"{statistics.median(ratios):.2f} times" if ratios and engine != OWN else ""
            each_round = ", ".join(f"{rate:.1f}" for rate in rates.values())
            median = statistics.median(rates.values())
            rows.append(f"| {workload} | {engine} | {median:.1f} | {each_round} | {times} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=[OWN, "vllm", "transformers_static"])
    parser.add_argument("--workloads", nargs="+", default=["burst16", "burst48", "long8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(time.strftime("multirun/engines-%Y-%m-%d-%H-%M-%S")))
    parser.add_argument("--settings", nargs="*", default=[], help="of kvlab run")
    arguments = parser.parse_args()
    run(arguments.engines, arguments.workloads, arguments.rounds, arguments.directory, arguments.settings)
    print(f"\n{describe('cpu')}; {time.strftime('%Y-%m-%d')}\n")
    print(table(read_sweep(arguments.directory)))


if __name__ == "__main__":
    main()
