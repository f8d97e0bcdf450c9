"""Simulated runs beside real ones of the same machine, timed by a fit to one of their workloads.

    python -m experiments.simulated_vs_real.run            compares; a few seconds
    python -m experiments.simulated_vs_real.run --record   makes all recordings anew first, fits, then compares

Real runs are kept as their figures (measured.csv) and, of the workload that is fitted to, their steps (burst16/).
Their fit is calibration.yaml. The comparison writes results.csv and errors.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.runs import configure, measure
from kvlab.run_files import CONFIG, STEPS, SUMMARY
from kvlab.simulation.timings.fitted import FittedTiming

HERE = Path(__file__).parent
MODEL = "model=qwen3_0_6b"
FITTED, PREDICTED = "burst16", ("burst48", "mixed32", "heavy_tail", "shared_prefix")
REPEATS = 3
LIMITS = {  # percent
    "duration_s": 5.0,
    "latency/ttft_ms_p50": 10.0,
    "latency/ttft_ms_p99": 20.0,
    "latency/tpot_ms_p50": 10.0,
    "latency/tpot_ms_p99": 20.0,
}
#: What the fit needs of a summary.
FACTS = ("status", "machine", "threads", "attention", "kernels", "bytes_per_weight", "kv_bytes_per_token")
#: The pool that a real run has by default: a slot of the longest sequence for each of a batch.
POOL = "kv.num_blocks=3072"
Rows = list[dict[str, str | float]]


def record(folder: Path) -> None:
    """Run every workload `REPEATS` times, taking turns, and keep of it what is compared and fitted to."""
    rows: Rows = []
    for number in range(1, REPEATS + 1):
        for workload in (FITTED, *PREDICTED):
            directory = folder / workload / str(number)
            command = [MODEL, "kv=paged", f"workload={workload}", "tracking=off", "figures=false"]
            subprocess.run(
                [sys.executable, "-m", "kvlab.cli", "run", *command, f"hydra.run.dir={directory}"], check=True
            )
            rows.append(keep(directory, workload, number))
    write(HERE / "measured.csv", rows)
    runs = HERE / FITTED
    subprocess.run(
        [sys.executable, "-m", "kvlab.cli", "calibrate", str(runs), f"output={HERE / 'calibration.yaml'}"],
        check=True,
    )


def keep(directory: Path, workload: str, number: int) -> dict[str, str | float]:
    """The figures of a run as a row; the steps of one that is fitted to are copied."""
    summary = json.loads((directory / SUMMARY).read_text())
    if workload == FITTED:
        kept = HERE / FITTED / str(number)
        kept.mkdir(parents=True, exist_ok=True)
        for name in (STEPS, CONFIG):
            shutil.copy(directory / name, kept / name)
        facts = {name: summary[name] for name in FACTS}
        (kept / SUMMARY).write_text(json.dumps(facts, indent=2) + "\n")
    figures = {metric: round(summary["metrics"][metric], 3) for metric in LIMITS}
    return {"workload": workload, "run": number, **figures}


def predict(workload: str) -> tuple[dict[str, float], str | None]:
    """The figures of the workload, simulated, and a remark on steps that are larger than those fitted to."""
    timing = ["executor.timing=fitted", f"executor.timing_path={HERE / 'calibration.yaml'}"]
    settings = [MODEL, f"workload={workload}", "executor=simulated", "hardware=here", POOL, *timing]
    plan, log, metrics = measure(configure(settings))
    assert isinstance(plan.timing, FittedTiming)
    return metrics, plan.timing.remark(log.steps)


def compare() -> Rows:
    """A row for each workload and figure: measured in the median, least and most of the runs, and predicted."""
    with (HERE / "measured.csv").open() as file:
        measured = list(csv.DictReader(file))
    rows: Rows = []
    for workload in (FITTED, *PREDICTED):
        predicted, remark = predict(workload)
        print(f"{workload}: {remark or 'no step is larger than those that were fitted'}")
        for metric, limit in LIMITS.items():
            runs = [float(run[metric]) for run in measured if run["workload"] == workload]
            middle = float(np.median(runs))
            rows.append(
                {
                    "workload": workload,
                    "figure": metric.removeprefix("latency/"),
                    "measured": middle,
                    "least_percent": round(100 * (min(runs) / middle - 1), 1),
                    "most_percent": round(100 * (max(runs) / middle - 1), 1),
                    "simulated": round(predicted[metric], 3),
                    "error_percent": round(100 * (predicted[metric] / middle - 1), 1),
                    "limit_percent": limit,
                }
            )
    return rows


def write(path: Path, rows: Rows) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(rows: Iterable[Mapping[str, str | float]]) -> None:
    """Print them as a table of the README."""
    print("| workload | figure | measured, median of 3 | least to most | simulated | error | limit |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['workload']} | {row['figure']} | {row['measured']:,.1f} | {row['least_percent']:+.1f} to "
            f"{row['most_percent']:+.1f} % | {row['simulated']:,.1f} | {row['error_percent']:+.1f} % | "
            f"{row['limit_percent']:.0f} % |"
        )


def draw(rows: Rows, path: Path) -> None:
    """Errors as points, what the runs differ by as bars, limits in grey."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    names = ["duration", "ttft p50", "ttft p99", "tpot p50", "tpot p99"]
    workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
    colours = dict(zip(workloads, ["#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7"], strict=True))
    axes = figure.add_subplot()
    for index, limit in enumerate(LIMITS.values()):
        axes.fill_between([index - 0.45, index + 0.45], -limit, limit, color="#eeeeee", linewidth=0)
    for position, row in enumerate(rows):
        workload, index = divmod(position, len(LIMITS))
        at, colour = index + 0.17 * (workload - 2), colours[str(row["workload"])]
        spread = [float(row["least_percent"]), float(row["most_percent"])]
        axes.plot([at, at], spread, color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axes.plot(at, float(row["error_percent"]), "o", color=colour, label=row["workload"] if not index else None)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(-25, 25)
    axes.set_ylabel("% of the measured median")
    title = "Simulated beside measured: points; the three measured runs: bars; what was asked: grey"
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right center", frameon=False, title="fitted to burst16")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="make all recordings anew, about ten minutes")
    if parser.parse_args().record:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
    rows = compare()
    write(HERE / "results.csv", rows)
    draw(rows, HERE / "errors.png")
    show(rows)


if __name__ == "__main__":
    main()
