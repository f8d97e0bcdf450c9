"""Memory over time: blocks in use and cached, the tokens in them, and how many sequences run and wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import PoolStats, StepRecord
from kvlab.lab.figures import style
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


_NO_POOL = PoolStats(block_size=0, blocks_total=0, blocks_in_use=0, tokens_stored=0)


def memory_series(steps: Sequence[StepRecord]) -> MemorySeries:
    """The series of a step log, which may be empty."""
    pools = [step.pool or _NO_POOL for step in steps]
    last = pools[-1] if pools else _NO_POOL
    rows = [
        (step.start_s, pool.blocks_in_use, pool.blocks_cached, pool.tokens_stored, step.running, step.waiting)
        for step, pool in zip(steps, pools, strict=True)
    ]
    rows += [(steps[-1].end_s, *rows[-1][1:])] if steps else []
    at, in_use, cached, tokens, running, waiting = np.array(rows, dtype=float).reshape(-1, 6).T
    stored = tokens / max(last.block_size, 1)
    preempted_at = np.repeat(at[:-1], [step.preempted for step in steps])
    return MemorySeries(
        at, in_use, cached, stored, running, waiting, preempted_at, last.blocks_total, last.block_size
    )


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
    axes.step(at, waiting, where="post", color=style.ORANGE, linewidth=1.6, label="waiting")
    axes.step(at, running, where="post", color=style.BLUE, linewidth=1.6, label="running")
    top, count = max(float(series.running.max()), float(series.waiting.max()), 1.0), len(series.preempted_at)
    axes.set(ylim=(0, top * 1.16), ylabel="sequences")
    if count:
        label = f"preemption ({count:,} in all)"
        mark: Any = {"color": style.VERMILION, "markersize": 5, "clip_on": False, "label": label}
        axes.plot(series.preempted_at, np.full(count, top * 1.09), "v", **mark)
    style.whole(axes.yaxis)
    style.legend(axes, columns=3, below=-0.3)
