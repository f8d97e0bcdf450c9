"""Attainment, goodput and tail latencies over the arrival rate, a line for each configuration."""

from collections.abc import Sequence
from itertools import cycle, pairwise
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.figures.points import Points, is_number
from kvlab.lab.figures.service_levels import limits_of
from kvlab.lab.results.metrics import ATTAINMENT, GOODPUT
from kvlab.lab.results.records import RunRecord

RATES = ("workload.rate", "workload.rate_scale")  # of drawn arrivals, and of a trace's own
_PANELS = {
    ATTAINMENT: "Requests within the limits, %",
    GOODPUT: "Goodput, requests per second",
    "latency/ttft_ms_p99": "First token (ttft), p99, ms",
    "latency/tpot_ms_p99": "Per output token (tpot), p99, ms",
}
_WIDE = 20.0  # times the smallest value: a logarithmic axis from here on


def rate_figure(records: Sequence[RunRecord], *, share: float = 99.0, keys: Sequence[str] = RATES) -> Figure | None:
    """Runs over the arrival rate in which they differ, or over another of `keys`; None where they do not. A line's
    name says up to which of the rates it keeps `share` percent of the requests within their limits. Repeats are
    shown by their medians.
    """
    points = Points.of(records)
    varied = points.varied_keys()
    key = next((key for key in keys if key in varied), None)
    points = Points(point for point in points if key and is_number(point.config.get(key)))
    shown = [name for name in _PANELS if points.values(name)]
    if key is None or not shown:
        return None
    others = [other for other in varied if other != key]
    lines = points.by_settings(others) if others else {"": points}
    figure = style.new_figure(3.1 + 2.3 * (len(shown) > 2) + 0.2 * len(lines))
    panels: list[Any] = list(figure.subplots(-(-len(shown) // 2), 2, squeeze=False).flat)
    for number, (name, panel) in enumerate(zip(shown, panels, strict=False)):
        style.tidy(panel, grid="both")
        style.title(panel, _PANELS[name])
        looks = zip(cycle(style.LINES), cycle(style.MARKERS), strict=False)
        for (label, members), (colour, marker) in zip(lines.items(), looks, strict=False):
            at = {rate: median(some) for rate, some in members.values_over(key, name).items() if some}
            text = _named(label, members, key, share) if not number and key in RATES else None
            panel.plot(list(at), list(at.values()), color=colour, marker=marker, markersize=4.5, label=text)
        limit = share if name == ATTAINMENT else _limit(name, records)
        _scale(panel, points.ordered(key), [*points.values(name), *([limit] if limit else [])], name)
        if limit:
            mark = f"{share:g} %" if name == ATTAINMENT else f"limit {style.number(limit)}"
            panel.axhline(limit, color=style.INK, linewidth=1.0, linestyle=(0, (4, 2)))
            place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "top"}
            panel.annotate(mark, (0, limit), (3, -2), fontsize=8, color=style.INK, **place)
    for panel in figure.axes[-2:]:
        panel.set_xlabel(key)
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    return figure


def _named(label: str, points: Points, key: str, share: float) -> str:
    """A line's name, and the largest rate before the first at which it does not keep the share."""
    held: list[float] = []
    text = f"{label}: {share:g} % within the limits".removeprefix(": ")
    for rate, shares in points.values_over(key, ATTAINMENT).items():
        if shares and median(shares) < share:
            return f"{text} up to {key}={held[-1]:g}" if held else f"{text} at none of the rates"
        held += [rate] if shares else []
    return f"{text} at each rate" if held else label


def _limit(name: str, records: Sequence[RunRecord]) -> float | None:
    """The limit on a latency, where all runs have the same."""
    limits = {limits_of(record.config).get(name.removeprefix("latency/").partition("_")[0]) for record in records}
    return limits.pop() if len(limits) == 1 else None


def _scale(panel: Any, rates: Sequence[float], values: Sequence[float], name: str) -> None:
    if rates[0] > 0 and rates[-1] >= 8 * rates[0]:
        style.logarithmic(panel.xaxis, rates[0], rates[-1])
        if all(high > 1.4 * low for low, high in pairwise(rates)):  # their texts have room
            panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
            panel.minorticks_off()
    if name.startswith("latency/") and 0 < _WIDE * min(values) < max(values):
        style.logarithmic(panel.yaxis, min(values), max(values))
    else:
        panel.set_ylim(0, 103 if name == ATTAINMENT else max(max(values) * 1.08, 1e-9))
        style.plain(panel.yaxis)
