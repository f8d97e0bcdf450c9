"""What tracking costs a run: with and without it in turn, each run a process of its own. See README.md."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlab.lab.machine import describe

AFTER = ("log_metrics", "log_series", "log_artifacts", "finish")
OPEN, WAIT = "open, while the engine is built", "wait until it is open"
RUN = ["model=qwen3_tiny", "workload=burst48", "executor.threads=1", "figures=false"]


def one(folder: Path, tracking: list[str], more: list[str]) -> dict[str, Any]:
    """Run once; what the process and its tracking took, on the clock and of a processor."""
    command = [sys.executable, "-m", "experiments.tracking_cost.one", *RUN, f"hydra.run.dir={folder}/run"]
    began, used = time.perf_counter(), _processor_s()
    done = subprocess.run([*command, *tracking, *more], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"wall": time.perf_counter() - began, "used": _processor_s() - used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="further settings of the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {"mlflow": [f"tracking.uri=sqlite:///{folder}/mlflow.db"], "off": ["tracking=off"]}
        one(folder, kinds["mlflow"], options.overrides)  # makes the store
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, tracking in kinds.items():
                runs[kind].append(one(folder, tracking, options.overrides))
    print(f"{describe('cpu')}; medians of {options.repeats}, {time.strftime('%Y-%m-%d')}\n")
    print("| what tracking does | on the clock, s | of a processor, s |\n|---|---|---|")
    for call in (OPEN, WAIT, *AFTER):
        clock, work = (
            _median([run[kind].get(call, 0.0) for run in runs["mlflow"]]) for kind in ("seconds", "work")
        )
        print(f"| {call} | {clock:.3f} | {work:.3f} |")
    seen = [sum(run["seconds"].get(call, 0.0) for call in (WAIT, *AFTER)) for run in runs["mlflow"]]
    print(f"| **what the run waits for** | {_median(seen):.3f} | |")
    print("\n| whole process | on the clock, s | of a processor, s | serving, s |\n|---|---|---|---|")
    for kind, found in runs.items():
        wall, used = (_median([run[key] for run in found]) for key in ("wall", "used"))
        serving = _median([run["seconds"]["serving"] for run in found])
        print(f"| tracking={kind} | {wall:.2f} | {used:.2f} | {serving:.2f} |")
    print()
    for kind, found in runs.items():
        names = sorted(set().union(*(run["meanwhile"] for run in found)))
        print(f"threads, and calls of tracking, while requests are served, tracking={kind}: {', '.join(names)}")


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
