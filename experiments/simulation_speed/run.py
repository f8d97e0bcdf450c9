"""Time, CPU time and memory of simulating recorded traffic: whole commands, files and figures included.

python -m experiments.simulation_speed.run MOONCAKE.jsonl AZURE.csv [--only mooncake azure sweep replay]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LLAMA = ["executor=simulated", "hardware=h100_sxm", "executor.tensor_parallel=4", "model=llama3_1_70b"]
_LLAMA += ["executor.timing=roofline"]

_FIRST = ["run", "model=qwen3_tiny", "workload.num_requests=1", "figures=false"]


def commands(mooncake: str, azure: str) -> dict[str, list[str]]:
    """The arguments of kvlab by name."""
    conversations = ["workload=mooncake", f"workload.path={mooncake}"]
    lengths = ["workload=azure", f"workload.path={azure}", "model.max_seq_len=16384"]
    points = [
        "workload.rate_scale=1,2,4,8",
        "scheduler.max_batch_size=48,128,256",
        "scheduler.max_batched_tokens=512,2048",
        "figures=false",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=-1",
    ]
    return {
        "mooncake": ["run", *_LLAMA, *conversations, "model.max_seq_len=131072"],
        "azure": ["run", *_LLAMA, *lengths],
        "sweep": ["run", "-m", *_LLAMA, *lengths, *points],
        "replay": ["replay", *conversations, "kv.block_size=512", "concurrency=16"],
    }


def _kvlab(arguments: list[str], folder: str) -> None:
    subprocess.run([sys.executable, "-m", "kvlab.cli", *arguments], cwd=folder, check=True, stdout=sys.stderr)


def main() -> None:
    """Run each command in a folder of its own, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mooncake", type=Path)
    parser.add_argument("azure", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    print("| command | time, s | CPU time, s | largest process, MB |\n|---|---|---|---|")
    for name, arguments in commands(str(options.mooncake.resolve()), str(options.azure.resolve())).items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            _kvlab(_FIRST, folder)  # makes the store of tracked runs, which takes seconds, once
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            _kvlab(arguments, folder)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # Of all children so far: run commands alone (--only) where a later one takes less.
        print(f"| {name} | {seconds:.0f} | {used:.0f} | {after.ru_maxrss / 1024:.0f} |", flush=True)


if __name__ == "__main__":
    main()
