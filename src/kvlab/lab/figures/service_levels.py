"""Service levels over time: the share of requests within the limits, and each request's latencies beside them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import RequestRecord
from kvlab.lab.figures import style
from kvlab.lab.results.requests import is_within
from kvlab.lab.results.tables import count

_WORDS = {"ttft": "first token", "tpot": "per output token"}
_WINDOWS = 60  # at most
_REQUESTS = 8  # in a window, on average, at least
_LENGTHS = (1, 2, 5)  # of a window, times a power of ten


class Windows(NamedTuple):
    """Requests by arrival, in windows of equal length. Of each window: how many requests, and how many of them
    within all limits. `edges[i]` to `edges[i + 1]` is window i.
    """

    edges: NDArray[np.float64]
    requests: NDArray[np.int64]
    within: NDArray[np.int64]

    @property
    def attainment(self) -> NDArray[np.float64]:
        """In percent; NaN where nothing arrived."""
        return 100 * self.within / np.where(self.requests, self.requests, np.nan)


def limits_of(config: Mapping[str, object]) -> dict[str, float]:
    """The limits of a recorded run in milliseconds, by the name of the latency: ttft, tpot."""
    limits = {name: config.get(f"slo.{name}_ms") for name in _WORDS}
    return {name: limit for name, limit in limits.items() if isinstance(limit, int | float)}


def attainment_windows(at: NDArray[np.float64], good: NDArray[np.bool_]) -> Windows:
    """Requests that arrived `at` these times, and whether each is within its limits, in windows of 1, 2 or 5 times
    a power of ten: as short as leaves 8 requests in each on average, and no more than 60 windows.
    """
    last = float(at.max())
    least = max(last, 1e-9) / max(min(_WINDOWS, len(at) // _REQUESTS), 1)
    power = 10.0 ** np.floor(np.log10(least))
    length = next((step * power for step in _LENGTHS if step * power >= least), 10 * power)
    edges = length * np.arange(int(last // length) + 2)
    return Windows(edges, np.histogram(at, edges)[0], np.histogram(at[good], edges)[0])


def service_level_figure(
    records: Sequence[RequestRecord], limits: Mapping[str, float], *, refused: int = 0
) -> Figure:
    """Attainment in windows of arrival above, below it each request's ttft and tpot with its limit. Requests that
    all arrived at once stand in their order. Of those that were `refused` there are no records: they count in the
    heading alone.
    """
    at, label, unit = np.array([record.arrival_s for record in records]), "arrival, s", "s"
    if at.max() - at.min() < 1e-3:
        label, unit = "request, in order: all arrived at once", "requests"
        at = np.arange(len(records), dtype=float)
    good = {name: np.array([is_within(one, name, most) for one in records]) for name, most in limits.items()}
    both = np.logical_and.reduce(list(good.values()))
    windows, submitted = attainment_windows(at, both), len(records) + refused
    figure = style.new_figure(6.6)
    panels: list[Any] = list(figure.subplots(3, 1, height_ratios=(3, 2, 2), sharex=True))
    for axes in panels:
        style.tidy(axes, grid="both")
    said = " and ".join(f"{name} {style.number(most)} ms" for name, most in limits.items())

    def share(within: NDArray[np.bool_]) -> str:
        return f"{style.number(100 * float(within.sum()) / submitted)} %"

    notes = [f"in windows of {style.number(float(windows.edges[1]))} {unit}"]
    if lost := sum(not record.completed for record in records):
        notes.append(f"{lost:,} did not complete")
    if refused:
        notes.append(f"{refused:,} more were refused or not sent, and are not shown")
    heading = f"{share(both)} of {count(submitted, 'request')} within {said}"
    style.title(panels[0], heading, ", ".join(notes))
    _draw_attainment(panels[0], windows)
    for axes, (name, words) in zip(panels[1:], _WORDS.items(), strict=True):
        values = [getattr(record, f"{name}_ms") if record.completed else None for record in records]
        _draw_latency(axes, at, np.array(values, dtype=float), limits.get(name))
        text = f"{words}: {share(good[name])} within" if name in good else f"{words}: no limit"
        axes.set_title(text, loc="left", fontsize=9, color=style.INK)
        axes.set_ylabel(f"{name}, ms")
    margin = max(float(at.max()) * 0.01, 1e-3)
    panels[-1].set(xlabel=label, xlim=(-margin, float(at.max()) + margin))
    style.plain(panels[-1].xaxis)
    return figure


def _draw_attainment(axes: Any, windows: Windows) -> None:
    for (start, end), share in zip(pairwise(windows.edges.tolist()), windows.attainment.tolist(), strict=True):
        if share == share:  # something arrived
            axes.fill_between((start, end), 0, share, color=style.SKY, alpha=0.35, linewidth=0)
            axes.plot((start, end), (share, share), color=style.BLUE, linewidth=1.8, solid_capstyle="butt")
    axes.set(ylim=(0, 103), ylabel="within limits, %")


def _draw_latency(axes: Any, at: NDArray[np.float64], values: NDArray[np.float64], limit: float | None) -> None:
    """A dot for each request that has the latency, those beyond the limit in another colour."""
    has = np.isfinite(values) & (values > 0)
    if not has.any():
        style.nothing(axes, "no completed request has one")
        return
    beyond = has & (values > (np.inf if limit is None else limit))
    size = 16 if len(at) < 200 else 6 if len(at) < 2000 else 2
    for chosen, colour in ((has & ~beyond, style.BLUE), (beyond, style.VERMILION)):
        axes.scatter(at[chosen], values[chosen], s=size, color=colour, linewidth=0, alpha=0.7)
    low, high = float(values[has].min()), float(values[has].max())
    if limit is not None:
        low, high = min(low, limit), max(high, limit)
        axes.axhline(limit, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)))
    if high > 20 * low:
        style.logarithmic(axes.yaxis, low, high)
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        axes.set_ylim(0, high * 1.15)
        style.plain(axes.yaxis)
