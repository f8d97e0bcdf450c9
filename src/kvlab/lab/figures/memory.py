"""Memory over time: blocks in use and cached, the tokens in them, and how many sequences run and wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import StepRecord
from kvlab.lab.figures import style
from kvlab.lab.steps import StepLog
from kvlab.lab.tables import count


class MemorySeries(NamedTuple):
    """A run's memory as step functions of time: the value at `at[i]`, in seconds, holds until `at[i + 1]`. Values
    are numbers of blocks or sequences; `tokens` is how many full blocks the stored tokens would fill.
    """

    at: NDArray[np.float64]
    in_use: NDArray[np.float64]
    cached: NDArray[np.float64]
    tokens: NDArray[np.float64]
    running: NDArray[np.float64]
    waiting: NDArray[np.float64]
    preempted_at: NDArray[np.float64]  # seconds, one for each preemption
    capacity: int
    block_tokens: int


def memory_series(steps: Sequence[StepRecord]) -> MemorySeries:
    """The series of a step log, which may be empty."""
    log = StepLog.of(steps)
    names = ("blocks_in_use", "blocks_cached", "tokens_stored")
    columns = [log.column(f"pool.{name}") for name in names] + [log.column(name) for name in ("running", "waiting")]
    values = np.array([[*column, *column[-1:]] for column in columns], dtype=float)  # the last holds to the end
    at = np.append(log.column("start_s"), log.column("end_s")[-1:])
    in_use, cached, tokens, running, waiting = values
    last = log[-1].pool if log else None
    size, total = (last.block_size, last.blocks_total) if last is not None else (0, 0)
    preempted_at = np.repeat(at[:-1], log.column("preempted"))
    return MemorySeries(at, in_use, cached, tokens / max(size, 1), running, waiting, preempted_at, total, size)


def memory_figure(steps: Sequence[StepRecord], *, unit: str = "block") -> Figure:
    """Blocks above, sequences below, on one time axis. `unit` is what a block is called."""
    if not steps:
        figure, axes = style.new_axes(5.4, "", grid="y")
        style.title(axes, "Memory over time")
        style.nothing(axes, "there is no step to show")
        return figure
    series = memory_series(steps)
    figure = style.new_figure(5.4)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    for axes in (above, below):
        style.tidy(axes)
    _draw_blocks(above, series, unit)
    _draw_sequences(below, series)
    above.set_xlim(min(series.at[0], 0), max(series.at[-1], 1e-3))
    below.set_xlabel("time, s")
    peak = 100 * float(series.in_use.max()) / max(series.capacity, 1)
    heading = f"At most {peak:.0f} % of {count(series.capacity, unit)} in use"
    note = f"a {unit} has {series.block_tokens:,} token slots; those between line and edge hold no token"
    style.title(above, heading, note)
    return figure


def _draw_blocks(axes: Any, series: MemorySeries, unit: str) -> None:
    at, in_use, both, tokens = style.thin(series.at, series.in_use, series.in_use + series.cached, series.tokens)
    area: Any = {"step": "post", "linewidth": 0}
    axes.fill_between(at, 0, in_use, color=style.SKY, label=f"{unit}s in use", **area)
    if series.cached.any():
        label = f"free {unit}s with cached content"
        axes.fill_between(at, in_use, both, color=style.CACHED, label=label, **area)
    axes.step(at, tokens, where="post", color=style.BLUE, linewidth=1.4, label=f"stored tokens, as full {unit}s")
    axes.axhline(series.capacity, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)), label="capacity")
    axes.set(ylim=(0, series.capacity * 1.06), ylabel=f"{unit}s")
    style.whole(axes.yaxis)
    style.legend(axes, columns=4, below=-0.04)


def _draw_sequences(axes: Any, series: MemorySeries) -> None:
    at, running, waiting = style.thin(series.at, series.running, series.waiting)
    width = 1.6 if len(at) == len(series.at) else 0.7  # between the extremes of each moment
    axes.step(at, waiting, where="post", color=style.ORANGE, linewidth=width, label="waiting")
    axes.step(at, running, where="post", color=style.BLUE, linewidth=width, label="running")
    top, count = max(float(series.running.max()), float(series.waiting.max()), 1.0), len(series.preempted_at)
    axes.set(ylim=(0, top * 1.16), ylabel="sequences")
    if count:
        label = f"preemption ({count:,} in all)"
        mark: Any = {"color": style.VERMILION, "markersize": 5, "clip_on": False, "label": label}
        axes.plot(series.preempted_at, np.full(count, top * 1.09), "v", **mark)
    style.whole(axes.yaxis)
    style.legend(axes, columns=3, below=-0.3)
