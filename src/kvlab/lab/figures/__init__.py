"""Figures of runs and sweeps, drawn from records with Matplotlib, and interactive ones with Plotly.

Both libraries are imported with this package, so import it late.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure

from kvlab.config.fleet import life_events
from kvlab.config.groups import read_groups
from kvlab.errors import OutputError
from kvlab.kv.pools import unit_of
from kvlab.lab.figures import style
from kvlab.lab.figures.arrival_rate import rate_figure
from kvlab.lab.figures.capacity_curve import capacity_figure
from kvlab.lab.figures.fleet import fleet_figure
from kvlab.lab.figures.interactive import heat_map_hover, page, pareto_hover, pool_map_hover, timeline_hover
from kvlab.lab.figures.latency import latency_figure
from kvlab.lab.figures.memory import memory_figure, told_columns, told_memory_figure
from kvlab.lab.figures.metric_charts import metric_figure
from kvlab.lab.figures.pareto import measured_points, pareto_figure
from kvlab.lab.figures.points import THROUGHPUT, Points
from kvlab.lab.figures.pool_map import pool_map_figure, record_grids, tenant_map_figure
from kvlab.lab.figures.prefix_places import prefix_places_figure, router_hits_figure
from kvlab.lab.figures.service_levels import limits_of, service_level_figure
from kvlab.lab.figures.timeline import timeline_figure
from kvlab.lab.files import attempt, replacing, write_text
from kvlab.lab.results.records import RunRecord

FOLDER, PAGE = "figures", "hover.html"
_MARK = 150  # characters of a line of small print below a figure


def run_figures(record: RunRecord) -> dict[str, Figure]:
    """A run's figures by name: memory, or fleet and prefixes where there are several replicas, pool_map, timeline,
    latency, and service_levels where the run had limits, without those that are `left_out`.
    """
    steps, requests, missing = record.steps(), record.requests(), left_out(record)
    unit = unit_of(str(record.config.get("kv.backend")))
    figures = {}
    if replicas := _replicas(record):
        deaths, is_split = _deaths(record, replicas), bool(record.config.get("fleet.prefill"))
        figures["fleet"] = fleet_figure(steps, replicas, _groups(record), deaths, is_split=is_split)
        if (prefixes := record.prefixes()) is not None:
            end_s = float(steps.column("end_s").max(initial=0))
            figures["prefixes"] = prefix_places_figure(prefixes, replicas, end_s)
    if "memory" not in missing:
        figures["memory"] = memory_figure(steps, unit=unit) if steps else told_memory_figure(record.series())
    if "pool_map" not in missing:
        grids = record_grids(record)
        figures["pool_map"] = pool_map_figure(grids.picture if grids else None, unit=unit)
        if (tenants := tenant_map_figure(record, unit=unit)) is not None:
            figures["pool_tenants"] = tenants
    if requests:
        figures |= {"timeline": timeline_figure(requests), "latency": latency_figure(requests)}
        if limits := limits_of(record.config):
            refused = int(record.metrics.get("requests/refused", 0))
            figures["service_levels"] = service_level_figure(requests, limits, refused=refused)
    return mark_simulated(figures, [record])


def left_out(record: RunRecord) -> dict[str, str]:
    """The figures that cannot be drawn from what a run recorded, by name, and why."""
    has_blocks = bool(record.steps().column("has_pool").any())
    reasons = {} if has_blocks or told_columns(record.series()) else {"memory": "its steps have no blocks"}
    if _replicas(record):
        reasons["memory"] = "its steps are those of several replicas, which fleet.png shows"
    if record.blocks() is None or not has_blocks:
        reasons["pool_map"] = "it kept no record of single blocks"
    if not record.requests():
        reasons |= dict.fromkeys(("timeline", "latency"), "no request was recorded")
    return reasons


def _replicas(record: RunRecord) -> int:
    """How many replicas a run had; 0 where its steps are of one."""
    last = int(record.steps().column("replica").max(initial=0))
    return max(last + 1, int(str(record.config.get("fleet.replicas", 1)))) if last else 0


def _groups(record: RunRecord) -> list[tuple[str, int]]:
    """The groups of a run's replicas, each with how many; none where all are alike."""
    groups = record.config.get("fleet.groups")
    if not isinstance(groups, list):
        return []
    replicas, prefill = (int(str(record.config.get(f"fleet.{name}", 0))) for name in ("replicas", "prefill"))
    return [(group.name, group.replicas) for group in read_groups(groups, replicas, prefill)]


def _deaths(record: RunRecord, replicas: int) -> list[tuple[float, int]]:
    """When which replicas died, in seconds."""
    life = record.config.get("fleet.life")
    events = life_events(map(str, life), replicas) if isinstance(life, list) else []
    return [(event.at_s, event.replica) for event in events if event.event == "die"]


def title_of(name: str) -> str:
    """A figure's name in words."""
    return name.replace("_", " ")


def sweep_figures(records: Sequence[RunRecord], metrics: Sequence[str] = ()) -> dict[str, Figure]:
    """What runs show together, by name: `throughput` over what was varied, `sequences` that ran at once where that
    is two numbers, `arrival_rate` where that was varied, `router_hits` where routers were, `pareto`, and `capacity`
    where runs say how large their cache was. Nothing for one run.
    Each of `metrics` is drawn as the throughput is; its name is the metric's with `_` for `/`.
    """
    if len(records) < 2:
        return {}
    points = Points.of(records)
    figures = {"throughput": metric_figure(points)}
    for metric in metrics:
        if metric != THROUGHPUT:
            figures[metric.replace("/", "_")] = metric_figure(points, metric)
    if len(points.varied_amounts()) == 2:
        figures["sequences"] = metric_figure(points, "capacity/peak_running")
    if (rates := rate_figure(records)) is not None:
        figures["arrival_rate"] = rates
    if (hits := router_hits_figure(points)) is not None:
        figures["router_hits"] = hits
    if measured_points(points):
        figures["pareto"] = pareto_figure(points)
    capacity = capacity_figure(records)
    return mark_simulated(figures if capacity is None else figures | {"capacity": capacity}, records)


def mark_simulated(figures: dict[str, Figure], records: Sequence[RunRecord]) -> dict[str, Figure]:
    """The figures; where runs were simulated, each says on what."""
    if mark := "; ".join(sorted({record.simulated for record in records} - {""})):
        for figure in figures.values():
            lines = "\n".join(wrap(mark, _MARK))
            figure.supxlabel(lines, x=0.99, ha="right", ma="right", fontsize=8, color=style.FAINT)
    return figures


def interactive_run(record: RunRecord) -> dict[str, Any]:
    """A run's Plotly figures by name: timeline, and pool_map where the run kept its block events."""
    requests = record.requests()
    figures = {"timeline": timeline_hover(requests)} if requests else {}
    if "pool_map" not in left_out(record) and (grids := record_grids(record)) is not None:
        unit = unit_of(str(record.config.get("kv.backend")))
        figures["pool_map"] = pool_map_hover(grids.page, requests, unit=unit)
    return figures


def interactive_sweep(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Plotly figures of runs together by name: throughput where two numbers were varied, and pareto."""
    points = Points.of(records)
    figures: dict[str, Any] = {}
    if len(amounts := points.varied_amounts()) == 2:
        figures["throughput"] = heat_map_hover(points.grid(amounts, THROUGHPUT))
    if measured_points(points):
        figures["pareto"] = pareto_hover(points)
    return figures


def save_run_figures(
    record: RunRecord, *, hover: bool = True, errors: list[OutputError] | None = None
) -> list[Path]:
    """Write a run's figures into `figures/` in its directory: a PNG each and, with `hover`, one HTML file that
    needs no network. Returns the files.

    Raises OutputError for one that cannot be written; with `errors` it is kept there, and the others are tried.
    """
    folder = record.directory / FOLDER
    files = save_figures(run_figures(record), folder, errors)
    if hover:
        notes = [f"There is no {title_of(name)}: {reason}." for name, reason in left_out(record).items()]
        notes += [f"{record.simulated}."] if record.simulated else []
        text = page(record.name, interactive_run(record).values(), notes)
        with attempt(errors):
            write_text(folder / PAGE, text)
            files.append(folder / PAGE)
    return files


def save_figures(
    figures: Mapping[str, Figure], folder: Path, errors: list[OutputError] | None = None
) -> list[Path]:
    """Write figures as `<name>.png` into a folder. Returns the files; `errors` as for `save_run_figures`."""
    files = []
    for name, figure in figures.items():
        with attempt(errors):
            save_figure(figure, folder / f"{name}.png")
            files.append(folder / f"{name}.png")
    return files


def save_figure(figure: Figure, path: Path) -> None:
    """Write one figure, in the format that the name of the file says. Raises OutputError."""
    with replacing(path) as own:
        figure.savefig(own)
