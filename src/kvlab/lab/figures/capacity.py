"""How many sequences fit, over their mean length: what the planner says, and what runs measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from kvlab.lab.figures import style

_COLOURS = {"paged": style.BLUE, "contiguous": style.VERMILION}
_MARKERS = {"paged": "o", "contiguous": "s"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Sequences that fit at once at each mean length, in tokens."""

    lengths: Sequence[float]
    sequences: Sequence[float]


@dataclass(frozen=True, slots=True)
class MeasuredCapacity:
    """The most sequences that a run had at once, and how long they were on average, in tokens."""

    backend: str
    mean_tokens: float
    sequences: float
    name: str = ""


def capacity_figure(
    curves: Mapping[str, Curve], measured: Sequence[MeasuredCapacity] = (), *, heading: str = ""
) -> Figure:
    """A curve for each backend, on logarithmic axes, and measured points on them."""
    figure = style.new_figure(4.6)
    axes = figure.add_subplot()
    style.tidy(axes, grid="both")
    axes.set_xlabel("mean length of a sequence, tokens")
    axes.set_ylabel("sequences at once")
    for backend, curve in curves.items():
        axes.plot(
            curve.lengths,
            curve.sequences,
            color=_COLOURS.get(backend, style.GREEN),
            linewidth=1.8,
            linestyle="-" if backend == "paged" else (0, (5, 2)),
            label=f"{backend}, planned",
        )
    for backend in dict.fromkeys(point.backend for point in measured):
        mine = [point for point in measured if point.backend == backend]
        axes.plot(
            [point.mean_tokens for point in mine],
            [point.sequences for point in mine],
            linestyle="none",
            marker=_MARKERS.get(backend, "D"),
            markersize=8,
            markerfacecolor=_COLOURS.get(backend, style.GREEN),
            markeredgecolor="white",
            label=f"{backend}, measured",
        )
    style.title(axes, heading or "How many sequences fit, by their mean length")
    if not curves and not measured:
        style.nothing(axes, "nothing to plan from and nothing measured")
        return figure
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        style.plain(axis)
    style.legend(axes, columns=4, bbox_to_anchor=(0, -0.14))
    return figure
