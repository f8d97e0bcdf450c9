"""What a sweep's points came to: the best, medians over repeats, what failed, the table as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.lab.catalogue import direction
from kvlab.lab.sweep.plan import SweepPlan
from kvlab.lab.tracking import RunStatus

BEST_BY = "throughput/output_tokens_per_s"  # where `optimize` names nothing


@dataclass(frozen=True, slots=True)
class Best:
    """The best value so far, and the point that has it."""

    metric: str
    value: float
    name: str

    def __str__(self) -> str:
        return f"{self.metric} = {self.value:,.4g} ({self.name})"


def read_results(directory: Path, plan: SweepPlan | None) -> list[dict[str, Any]]:
    """The summaries there are, in the order of the plan, each with its point's `name` and `group`.

    Without a plan, in the order of the directories' names.
    """
    if plan is None:
        files = sorted(directory.glob("*/summary.json"), key=lambda file: (len(file.parent.name), file.parent.name))
        summaries = [summary for file in files if (summary := _read(file))]
        return [{**summary, "group": summary["name"]} for summary in summaries]
    results = []
    for point in plan.points:
        if summary := _read(directory / point.directory / "summary.json"):
            results.append({**summary, "name": point.name, "group": point.group, "settings": point.settings})
    return results


def with_missing(results: list[dict[str, Any]], plan: SweepPlan | None, status: RunStatus) -> list[dict[str, Any]]:
    """The results, and for each planned point without one that it did not get that far."""
    known = {result["name"] for result in results}
    reason = "not run" if status is RunStatus.INTERRUPTED else "its process ended without a result"
    ended: dict[str, Any] = {"status": status.value, "error": reason, "metrics": {}, "choices": {}}
    missing = [point for point in (plan.points if plan else []) if point.name not in known]
    return [*results, *({"name": p.name, "group": p.group, "settings": p.settings, **ended} for p in missing)]


def medians(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each point: of its finished repeats, the median of every metric; how the worst of them ended."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["group"], []).append(result)
    return [_median(group, rows) for group, rows in groups.items()]


def best(results: Sequence[dict[str, Any]], optimize: str | None) -> Best | None:
    """The best point by `optimize`, or the throughput, where any has it: by the median of its repeats."""
    metric = optimize or BEST_BY
    rows = [row for row in medians(results) if metric in row["metrics"] and row["status"] == "finished"]
    if not rows:
        return None
    choose = min if direction(metric).more_is_better is False else max
    row = choose(rows, key=lambda row: row["metrics"][metric])
    return Best(metric, row["metrics"][metric], row["group"])


def metric_names(results: Sequence[dict[str, Any]]) -> list[str]:
    """Every metric that some point has."""
    return sorted({name for result in results for name in result["metrics"]})


def status_of(results: Sequence[dict[str, Any]]) -> RunStatus:
    """How the sweep ended. What does not fit in memory is a result."""
    found = {result["status"] for result in results}
    for status in (RunStatus.INTERRUPTED, RunStatus.FAILED):
        if status in found or not found:
            return status
    return RunStatus.FINISHED


def write_csv(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A row for each run."""
    metrics = metric_names(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "status", "error", *metrics])
        for result in results:
            row = [result["metrics"].get(name, "") for name in metrics]
            writer.writerow([result["name"], result["status"], result["error"] or "", *row])


def _read(file: Path) -> dict[str, Any] | None:
    """A run's summary; None where it has none yet, or another process is writing it just now."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found


def _median(group: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if len(rows) == 1:
        return {**rows[0], "name": group}
    order = (RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.OUT_OF_MEMORY, RunStatus.FINISHED)
    worst = min(rows, key=lambda row: order.index(row["status"]))
    finished = [row["metrics"] for row in rows if row["status"] == "finished"]
    names = {name for metrics in finished for name in metrics}
    values = {name: [metrics[name] for metrics in finished if name in metrics] for name in names}
    shown = f"{group} (median of {len(finished)})" if finished else group
    return {**worst, "name": shown, "metrics": {name: median(found) for name, found in values.items()}}
