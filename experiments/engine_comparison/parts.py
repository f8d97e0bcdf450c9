"""Where a step's time goes, in PyTorch's products and attention and in kvlab's kernels.

    python -m experiments.engine_comparison.parts [--workload burst16]
                                                  [--figure experiments/engine_comparison/parts.png]

Runs the workload with either, `debug=profile` on, and prints the mean time of a step by part. --figure draws it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from experiments.engine_comparison.run import SETTINGS
from kvlab.lab.machine import describe
from kvlab.lab.results.records import read_run
from kvlab.lab.run.profile import Part

WAYS = {
    "PyTorch": ["executor.kernels=false", "attention=sdpa"],
    "kvlab's kernels": [],
}


def measure(model: str, workload: str) -> dict[str, dict[str, float]]:
    """Each way's metrics."""
    found: dict[str, dict[str, float]] = {}
    command = [sys.executable, "-m", "kvlab.cli", "run", *SETTINGS, f"model={model}", f"workload={workload}"]
    for way, overrides in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, "debug=profile", *overrides, f"hydra.run.dir={folder}"], check=True)
            found[way] = dict(read_run(Path(folder)).metrics)
    return found


def part_ms(metrics: dict[str, float], part: Part) -> float:
    """Milliseconds of a step."""
    return metrics[f"profile/{part}_ms_mean"]


def draw(found: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Bars, a part on top of the other."""
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999999"]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    left = dict.fromkeys(found, 0.0)
    for part, colour in zip(Part, colours, strict=True):
        widths = [part_ms(metrics, part) for metrics in found.values()]
        axes.barh(list(found), widths, left=list(left.values()), label=str(part), color=colour)
        for way, width in zip(found, widths, strict=True):
            left[way] += width
    for row, end in enumerate(left.values()):
        axes.text(end, row, f" {end:.0f} ms", va="center")
    axes.set_xlim(0, max(left.values()) * 1.1)
    axes.invert_yaxis()
    axes.set_xlabel("mean time of a step, ms")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(colours), frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--workload", default="burst16")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.model, arguments.workload)
    title = f"{arguments.model}, {arguments.workload}, bfloat16, {describe('cpu')}, {time.strftime('%Y-%m-%d')}"
    print(title + "\n")
    print(f"| | {' | '.join(Part)} | whole step, ms | output tok/s |")
    print("|---|" + "---|" * (len(Part) + 2))
    for way, metrics in found.items():
        parts = [part_ms(metrics, part) for part in Part]
        cells = " | ".join(f"{ms:.1f}" for ms in [*parts, sum(parts)])
        print(f"| {way} | {cells} | {metrics['throughput/output_tokens_per_s']:.1f} |")
    if arguments.figure:
        draw(found, title, arguments.figure)


if __name__ == "__main__":
    main()
