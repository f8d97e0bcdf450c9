"""The results of a sweep's points: the best, medians over repeats, how the sweep ended, the table as CSV."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from kvlab.lab.campaigns.sweep.plan import SweepPlan
from kvlab.lab.results.catalogue import direction
from kvlab.lab.results.records import read_summary
from kvlab.lab.tracking import RunStatus

BEST_BY = "throughput/output_tokens_per_s"  # where `optimize` names nothing
_WORST_FIRST = (RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.OUT_OF_MEMORY, RunStatus.FINISHED)


def read_results(
    directory: Path,
    plan: SweepPlan,
    missing: RunStatus | None = None,
    returned: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """The summaries in the order of the plan, each with its point's `name`, `group` and `settings`.

    A summary that could not be written is that of `returned`, by the point's directory. A point without one is left
    out, or has the status `missing`.
    """
    reason = "not run" if missing is RunStatus.INTERRUPTED else "its process ended without a result"
    results = []
    for point in plan.points:
        summary = read_summary(directory / point.directory) or returned.get(point.directory)
        if summary is None and missing is not None:
            summary = {"status": missing.value, "error": reason, "metrics": {}, "choices": {}}
        if summary is not None:
            results.append({**summary, "name": point.name, "group": point.group, "settings": point.settings})
    return results


def medians(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each point: the medians of its finished repeats, the status of the worst of all."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["group"], []).append(result)
    return [_median(group, rows) for group, rows in groups.items()]


def best(results: Sequence[dict[str, Any]], optimize: str | None) -> str | None:
    """The best value by `optimize`, or the throughput, and the point that has it, where any has: by the median of
    its repeats.
    """
    metric = optimize or BEST_BY
    rows = [row for row in medians(results) if metric in row["metrics"] and row["status"] == "finished"]
    if not rows:
        return None
    choose = min if direction(metric).more_is_better is False else max
    row = choose(rows, key=lambda row: row["metrics"][metric])
    return f"{metric} = {row['metrics'][metric]:,.4g} ({row['group']})"


def metric_names(results: Sequence[dict[str, Any]]) -> list[str]:
    """Every metric that some point has."""
    return sorted({name for result in results for name in result["metrics"]})


def status_of(results: Sequence[dict[str, Any]]) -> RunStatus:
    """How the sweep ended. A point that does not fit in memory is a result, not a failure."""
    worst = min((_WORST_FIRST.index(result["status"]) for result in results), default=0)
    status = _WORST_FIRST[worst]
    return RunStatus.FINISHED if status is RunStatus.OUT_OF_MEMORY else status


def table_rows(results: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """The table of sweep.csv: names of columns, then a row for each run."""
    metrics = metric_names(results)
    yield ["name", "status", "error", *metrics]
    for result in results:
        row = [result["metrics"].get(name, "") for name in metrics]
        yield [result["name"], result["status"], result["error"] or "", *row]


def _median(group: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if len(rows) == 1:
        return {**rows[0], "name": group}
    worst = min(rows, key=lambda row: _WORST_FIRST.index(row["status"]))
    finished = [row["metrics"] for row in rows if row["status"] == "finished"]
    names = {name for metrics in finished for name in metrics}
    values = {name: median(metrics[name] for metrics in finished if name in metrics) for name in names}
    return {**worst, "name": f"{group} (median of {len(finished)})" if finished else group, "metrics": values}
