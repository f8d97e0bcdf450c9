"""Latency against throughput: which points no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from kvlab.lab import catalogue
from kvlab.lab.figures import style
from kvlab.lab.figures.points import THROUGHPUT, Point, by_settings, varied_keys

LATENCY = "latency/tpot_ms_p50"
_MOST_LABELS = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """A point of the plane: less latency and more throughput are better."""

    name: str
    latency: float
    throughput: float


def measured_points(
    points: Sequence[Point], latency: str = LATENCY, throughput: str = THROUGHPUT
) -> list[Measured]:
    """Where finished points lie that have both metrics; repeats of one by their medians."""
    found = []
    for label, members in by_settings(points, varied_keys(points)).items():
        both = [(point.value(latency), point.value(throughput)) for point in members]
        known = [(x, y) for x, y in both if x is not None and y is not None]
        if known:
            found.append(Measured(label, median(x for x, _ in known), median(y for _, y in known)))
    return found


def pareto_front(points: Sequence[Measured]) -> list[Measured]:
    """The points that no other beats in one and equals in the other, by latency."""
    front: list[Measured] = []
    for point in sorted(points, key=lambda p: (p.latency, -p.throughput)):
        if not front or point.throughput > front[-1].throughput:
            front.append(point)
    return front


def pareto_figure(points: Sequence[Point], latency: str = LATENCY, throughput: str = THROUGHPUT) -> Figure:
    """All points, the front as a line, and the names of those on it."""
    known = measured_points(points, latency, throughput)
    front = pareto_front(known)
    figure = style.new_figure(4.8)
    axes = figure.add_subplot()
    style.tidy(axes, grid="both")
    axes.set_xlabel(f"{catalogue.metric(latency).axis}  (less is better)")
    axes.set_ylabel(f"{catalogue.metric(throughput).axis}  (more is better)")
    style.title(
        axes,
        f"{len(front)} of {len(known)} points are beaten by no other in both",
        "to have more of one, a point on the line gives up some of the other",
    )
    if not known:
        style.nothing(axes, "no finished point has both figures")
        return figure
    others = [point for point in known if point not in front]
    if others:
        place: Any = {"linestyle": "none", "marker": "o", "color": style.CACHED, "markersize": 6}
        axes.plot([p.latency for p in others], [p.throughput for p in others], label="beaten by another", **place)
    axes.plot(
        [p.latency for p in front],
        [p.throughput for p in front],
        color=style.BLUE,
        marker="o",
        markersize=7,
        linewidth=1.4,
        drawstyle="steps-post",
        label="beaten by none",
    )
    axes.margins(x=0.12, y=0.12)
    every = -(-len(front) // _MOST_LABELS)
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    named: Measured | None = None
    for number, point in enumerate(front):
        if number % every and number != len(front) - 1:
            continue
        if (
            named is not None
            and point.latency - named.latency < 0.08 * (high - low)
            and point.throughput - named.throughput < 0.03 * (top - bottom)
        ):
            continue  # its name would lie on the last one's
        named = point
        right = point.latency < (low + high) / 2
        axes.annotate(
            style.shorten(point.name, 48),
            (point.latency, point.throughput),
            xytext=(7, -9) if right else (-7, 7),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=8,
            color=style.INK,
        )
    style.plain(axes.xaxis)
    style.plain(axes.yaxis)
    style.legend(axes, columns=2, bbox_to_anchor=(0, -0.13))
    return figure
