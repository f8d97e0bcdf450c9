"""Latencies as cumulative distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from kvlab.core import RequestRecord
from kvlab.lab.figures import style
from kvlab.lab.results.requests import latencies_ms
from kvlab.lab.results.tables import count

_LATENCIES = {
    "ttft": ("First token", "request"),
    "tpot": ("Per output token", "request"),
    "itl": ("Between two tokens", "gap"),
    "e2el": ("Whole request", "request"),
}
_WIDE = 20.0  # times the smallest value: a logarithmic axis from here on
_MARKS = (50, 90, 99)


def latency_figure(records: Sequence[RequestRecord]) -> Figure:
    """Four distributions: which share of requests, or of gaps, took at most as long."""
    latencies = latencies_ms(records)
    figure = style.new_figure(5.4)
    for index, (name, (words, unit)) in enumerate(_LATENCIES.items()):
        label = "" if index % 2 else "cumulative share, %"
        axes = figure.add_subplot(2, 2, index + 1, xlabel="ms", ylabel=label, ylim=(0, 102))
        style.tidy(axes, grid="both")
        _distribution(axes, f"{words} ({name})", unit, np.sort(latencies[name]))
    return figure


def _distribution(axes: Any, name: str, unit: str, x: NDArray[np.float64]) -> None:
    if not len(x):
        style.title(axes, name)
        style.nothing(axes, f"no completed {unit}" if unit != "gap" else "no gap between tokens")
        return
    shares = 100 * np.arange(1, len(x) + 1) / len(x)
    chosen = style.spread(len(x))
    steps = np.append(x[0], x[chosen]), np.append(0, shares[chosen])
    axes.step(*steps, where="post", color=style.BLUE, linewidth=1.6)
    marks = np.percentile(x, _MARKS)
    axes.plot(marks, _MARKS, linestyle="none", marker="o", markersize=6, color=style.VERMILION, clip_on=False)
    words = [f"p{share} {style.number(mark)}" for share, mark in zip(_MARKS, marks.tolist(), strict=True)]
    style.title(axes, name, f"{',  '.join(words)}  ({count(len(x), unit)})")
    low, high = float(x[0]), float(x[-1])
    if low > 0 and high / low > _WIDE:
        style.logarithmic(axes.xaxis, low, high)
        return
    if high - low < 0.01 * high:
        axes.set_xlim(low * 0.9, high * 1.1)
    elif low < high / 2:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    style.plain(axes.xaxis)
