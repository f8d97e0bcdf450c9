"""Latency against throughput: which points no other beats in both."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.figures.points import THROUGHPUT, Points
from kvlab.lab.results.catalogue import metric

LATENCY = "latency/tpot_ms_p50"
X_LABEL, Y_LABEL = metric(LATENCY).axis, metric(THROUGHPUT).axis
_MOST_LABELS = 12


class Measured(NamedTuple):
    """A point of the plane: less latency and more throughput are better."""

    name: str
    latency: float
    throughput: float


def measured_points(points: Points) -> list[Measured]:
    """Where finished points lie that have both metrics; repeats of one by their medians."""
    measured = []
    for label, members in points.by_settings(points.varied_keys()).items():
        both = [(point.value(LATENCY), point.value(THROUGHPUT)) for point in members]
        known = [(x, y) for x, y in both if x is not None and y is not None]
        if known:
            measured.append(Measured(label, median(x for x, _ in known), median(y for _, y in known)))
    return measured


def pareto_front(points: Sequence[Measured]) -> list[Measured]:
    """The points that no other beats in one and equals in the other, by latency."""
    front: list[Measured] = []
    for point in sorted(points, key=lambda p: (p.latency, -p.throughput)):
        if not front or point.throughput > front[-1].throughput:
            front.append(point)
    return front


def pareto_figure(points: Points) -> Figure:
    """All points, the front as a line, and the names of those on it."""
    known = measured_points(points)
    front = pareto_front(known)
    figure, axes = style.new_axes(4.8, f"{X_LABEL}  (less is better)", f"{Y_LABEL}  (more is better)")
    heading = f"{len(front)} of {len(known)} points are on the Pareto front"
    note = "no other point is at least as good in both and better in one"
    if unlike := [key for key in points.varied_keys() if key.partition(".")[0] in ("workload", "model")]:
        note += f"; those of another {unlike[0]} do other work"
    style.title(axes, heading, note)
    if not known:
        style.nothing(axes, "no finished point has both metrics")
        return figure
    others = [point for point in known if point not in front]
    if others:
        _, x, y = zip(*others, strict=True)
        axes.plot(x, y, "o", color=style.CACHED, markersize=6, label="dominated by another")
    _, x, y = zip(*front, strict=True)
    line: Any = {"drawstyle": "steps-post", "linewidth": 1.4, "markersize": 7}
    axes.plot(x, y, "-o", color=style.BLUE, label="Pareto front", **line)
    axes.margins(x=0.12, y=0.12)
    _name_points(axes, front)
    style.plain(axes.xaxis)
    style.plain(axes.yaxis)
    style.legend(axes, columns=2, below=-0.13)
    return figure


def _name_points(axes: Any, front: Sequence[Measured]) -> None:
    """The names of some of the front's points, so that none lies on another."""
    every = -(-len(front) // _MOST_LABELS)
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    last = Measured("", -math.inf, -math.inf)
    for point in [*front[:-1:every], front[-1]]:
        right, above = point.latency - last.latency, point.throughput - last.throughput
        if right < 0.08 * (high - low) and above < 0.03 * (top - bottom):
            continue
        last = point
        offset, side = ((7, -9), "left") if point.latency < (low + high) / 2 else ((-7, 7), "right")
        name, at = style.shorten(point.name, 48), (point.latency, point.throughput)
        axes.annotate(name, at, offset, "data", "offset points", ha=side, va="center", fontsize=8, color=style.INK)
