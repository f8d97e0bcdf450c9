"""How far off the time is that a run says it will take, before it does: a table of runs.

python -m experiments.run_estimates.run
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab.cli.compose import compose_run
from kvlab.lab.machine import describe
from kvlab.lab.machine_rates import rates_here
from kvlab.lab.run.estimate import estimate_s
from kvlab.lab.run.plan import plan_run

RUNS = (
    "model=qwen3_mini workload=mixed32 workload.arrival=burst workload.num_requests=96",
    "model=qwen3_0_6b workload=burst16",
    "model=qwen3_0_6b workload=burst16 executor.dtype=float32 workload.output_len=20",
    "model=qwen3_0_6b workload=mixed32 workload.arrival=burst workload.output_len=16",
    "model=qwen3_0_6b workload=burst48 workload.output_len=8 workload.prompt_len=64",
    "model=qwen3_0_6b workload=shared_prefix workload.arrival=burst workload.num_requests=8",
)


def main() -> None:
    """Estimate each run here, and serve it in a process of its own."""
    print(f"{describe('cpu')}\n\n| run | estimated | took | ratio |\n|---|---|---|---|")
    for text in RUNS:
        config = compose_run(text.split()).config
        expected = estimate_s(plan_run(config), rates_here(config.executor.dtype, None))
        with tempfile.TemporaryDirectory() as folder:
            quiet = ("tracking=off", "figures=false", f"hydra.run.dir={folder}")
            command = [sys.executable, "-m", "src.run", *text.split(), *quiet]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            took = json.loads((Path(folder) / "summary.json").read_text())["metrics"]["duration_s"]
        print(f"| `{text}` | {expected:.1f} s | {took:.1f} s | {took / expected:.2f} |", flush=True)


if __name__ == "__main__":
    main()
