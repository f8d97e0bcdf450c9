"""Several replicas over time: blocks in use and waiting requests as maps of a row for each, and what each found."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core.step_log import StepLog
from kvlab.lab.figures import style
from kvlab.lab.figures.memory import memory_series

_FOUND = "found in the\nprefix cache, %"
_COLUMNS = 400  # moments of a map
_FAINT = 10.0  # % of a pool: on a scale up to all of it less could not be seen
_ROW, _LEAST, _MOST = 0.09, 1.3, 4.0  # inches: of a row of a map, and of a map at least and at most


def fleet_figure(
    steps: StepLog,
    replicas: int,
    groups: Sequence[tuple[str, int]] = (),
    deaths: Sequence[tuple[float, int]] = (),
    *,
    is_split: bool = False,
) -> Figure:
    """A map of the share of each replica's pool that is in use, beside it as bars the share of its prompts' tokens
    that were found in its prefix cache, and below it a map of the requests that wait there. Names of
    `groups`, each of so many replicas, stand beside the rows of that. From its death on, in seconds, a replica has
    nothing until its next step. `is_split`: some pull what others computed, which their steps count as found.
    """
    logs = [steps.of_replica(replica) for replica in range(replicas)]
    edges = np.linspace(0, max(float(steps.column("end_s").max(initial=0)), 1e-3), _COLUMNS + 1)
    used, waiting = _used_and_waiting(logs, deaths, edges)
    prompts, hits = (
        np.array([log.column(f"counters.{name}_tokens").sum() for log in logs]) for name in ("prompt", "hit")
    )
    height = min(max(_ROW * replicas, _LEAST), _MOST)
    figure = style.new_figure(2 * height + 1.6)
    (above, bars), (below, empty) = figure.subplots(2, 2, width_ratios=(6, 1), sharex="col", sharey="row")
    empty.set_visible(False)
    most_used = float(used.max())
    scale = 100.0 if most_used >= _FAINT or not most_used else most_used
    for axes, values, what, top in (
        (above, used, "% of blocks in use", scale),
        (below, waiting, "requests waiting", max(float(waiting.max()), 1.0)),
    ):
        style.amounts(figure, axes, values, edges[-1], what, top=top, aspect=14)
        axes.tick_params(labelbottom=True)
        axes.set_ylabel("replica")
        style.whole(axes.yaxis)
    if len(groups) > 1:
        counts = np.array([count for _, count in groups])
        below.set_ylabel("")
        below.set_yticks(np.cumsum(counts) - (counts + 1) / 2, [name for name, _ in groups])
    below.set_xlabel("time, s")
    _bars(bars, 100 * hits / np.maximum(prompts, 1), "found or pulled,\n% of prompts" if is_split else _FOUND)
    fullest, longest = int(used.max(axis=1).argmax()), int(waiting.max(axis=1).argmax())
    style.title(above, f"At most {style.percent(most_used / 100)} of a pool in use, of replica {fullest}")
    most = f"{waiting.max():.0f} requests wait, for replica {longest}"
    style.title(below, f"At most {most}" if waiting.any() else "No request waits")
    return figure


def _used_and_waiting(
    logs: Sequence[StepLog], deaths: Sequence[tuple[float, int]], edges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each replica, by its steps: % of its blocks in use and requests waiting, means between each two edges."""
    used, waiting = np.zeros((2, len(logs), len(edges) - 1))
    for replica, log in enumerate(logs):
        if log:
            series = memory_series(log)
            died = [at_s for at_s, dead in deaths if dead == replica]
            places = np.searchsorted(series.at, died)
            at = np.insert(series.at, places, died)
            blocks, queue = (np.insert(values, places, 0.0) for values in (series.in_use, series.waiting))
            used[replica] = 100 * _means(at, blocks, edges) / max(series.capacity, 1)
            waiting[replica] = _means(at, queue, edges)
    return used, waiting


def _means(at: NDArray[np.float64], values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean between each two edges of a step function, which is 0 before it begins and holds its last value."""
    ends = np.append(at, max(float(edges[-1]), float(at[-1])))
    areas = np.append(0.0, np.cumsum(values * np.diff(ends)))
    means: NDArray[np.float64] = np.diff(np.interp(edges, ends, areas)) / np.diff(edges)
    return means


def _bars(axes: Any, shares: NDArray[np.float64], heading: str) -> None:
    axes.barh(range(len(shares)), shares, color=style.BLUE, height=0.8)
    style.tidy(axes, grid="x")
    axes.set(xlim=(0, 100), xticks=(0, 50, 100))
    axes.tick_params(labelleft=False, left=False, labelbottom=True)
    axes.set_title(heading, loc="left", fontsize=9, color=style.INK)
