"""kvlab and other engines on the same requests, as one sweep of `kvlab run -m`.

    python -m experiments.engine_comparison.run --settings engine.python=ENVIRONMENT/bin/python
        [--engines kvlab vllm vllm_eager transformers_static] [--workloads burst16 burst48 shared_prefix long8]
        [--models qwen3_0_6b smollm2_shapes] [--rounds 5] [--directory FOLDER]

In each round every model and workload is served by one engine after the other, each started anew, and warm when the
clock starts. Prints output tokens per second, medians of the rounds, and how many times a figure kvlab's is: the
median of the ratios of each round, and their range. `kvlab report FOLDER by=engine` compares all metrics, with
intervals, over all workloads in pairs, and `by=workload,engine` for each. With the --directory of a sweep that was
stopped it serves what is missing.
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
from kvlab.lab.results.records import RunRecord, read_sweep

SETTINGS = [
    "model.max_seq_len=4096",
    "executor=cpu",
    "executor.dtype=bfloat16",
    "kv.memory=3GiB",
    "kv.prefix_sharing=true",
    "scheduler.max_batch_size=48",
    "scheduler.max_batched_tokens=1024",
    "figures=false",
]
RATE = "throughput/output_tokens_per_s"
OWN = "kvlab"


def run(
    engines: Sequence[str],
    models: Sequence[str],
    workloads: Sequence[str],
    rounds: int,
    folder: Path,
    others: Sequence[str],
) -> None:
    """The sweep, or what is missing of one that was begun in the folder. A point that fails is in its files; the
    others run.
    """
    swept = [f"model={','.join(models)}", f"workload={','.join(workloads)}", f"engine={','.join(engines)}"]
    command = [sys.executable, "-m", "kvlab.cli", "run", "-m", *swept, f"repeats={rounds}", *SETTINGS, *others]
    again = ["resume=true"] if folder.exists() else []
    subprocess.run([*command, *again, f"hydra.sweep.dir={folder}"], check=False)


def table(runs: Sequence[RunRecord]) -> str:
    """Markdown: a row for each model, workload and engine; of each round what finished."""
    found: dict[tuple[str, str], dict[str, dict[object, float]]] = defaultdict(lambda: defaultdict(dict))
    for each in runs:
        if each.finished:
            work = each.choices["model"], each.choices["workload"]
            found[work][each.choices["engine"]][each.config.get("repeat", 0)] = each.metrics[RATE]
    rows = ["| model | workload | engine | output tok/s | of each round | kvlab is |", "|---|---|---|---|---|---|"]
    for (model, workload), engines in found.items():
        own = engines.get(OWN, {})
        for engine, rates in engines.items():
            ratios = [own[repeat] / rate for repeat, rate in rates.items() if repeat in own]
            times = _times(ratios) if ratios and engine != OWN else ""
            each_round = ", ".join(f"{rate:.1f}" for rate in rates.values())
            median = statistics.median(rates.values())
            rows.append(f"| {model} | {workload} | {engine} | {median:.1f} | {each_round} | {times} |")
    return "\n".join(rows)


def _times(ratios: Sequence[float]) -> str:
    text = f"{statistics.median(ratios):.2f} times"
    return text if len(ratios) == 1 else f"{text} ({min(ratios):.2f} to {max(ratios):.2f})"


def starts(runs: Sequence[RunRecord]) -> str:
    """Markdown: how long each engine took to be ready, medians and the first of each model."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in runs:
        for metric in ("engine/load_s", "engine/compile_s"):
            if each.finished and metric in each.metrics:
                found[each.choices["model"], each.choices["engine"], metric].append(each.metrics[metric])
    rows = ["| model | engine | metric | first, s | median, s |", "|---|---|---|---|---|"]
    rows += [
        f"| {model} | {engine} | `{metric}` | {values[0]:.1f} | {statistics.median(values):.1f} |"
        for (model, engine, metric), values in found.items()
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=[OWN, "vllm"])
    parser.add_argument("--models", nargs="+", default=["qwen3_0_6b"])
    parser.add_argument("--workloads", nargs="+", default=["burst16", "burst48", "long8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(time.strftime("multirun/engines-%Y-%m-%d-%H-%M-%S")))
    parser.add_argument("--settings", nargs="*", default=[], help="of kvlab run")
    given = parser.parse_args()
    run(given.engines, given.models, given.workloads, given.rounds, given.directory, given.settings)
    runs = read_sweep(given.directory)
    print(f"\n{describe('cpu')}; {time.strftime('%Y-%m-%d')}\n")
    print(table(runs), starts(runs), sep="\n\n")


if __name__ == "__main__":
    main()
