"""Memory over time: blocks in use and cached, the tokens in them, and who runs and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import PoolStats, StepRecord
from kvlab.lab.figures import style


@dataclass(frozen=True, slots=True)
class MemorySeries:
    """A run's memory as step functions of time: the value at `at[i]` holds until `at[i + 1]`. All but times in
    blocks or sequences; `tokens` is tokens / token slots of a block, what they would take without any waste.
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
    values = [
        (step.start_s, pool.blocks_in_use, pool.blocks_cached, pool.tokens_stored, step.running, step.waiting)
        for step, pool in zip(steps, pools, strict=True)
    ]
    start, in_use, cached, tokens, running, waiting = np.array(values, dtype=float).reshape(-1, 6).T
    size = pools[-1].block_size if pools else 1

    def held(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.append(values, values[-1]) if len(values) else values

    return MemorySeries(
        at=np.append(start, steps[-1].end_s) if steps else start,
        in_use=held(in_use),
        cached=held(cached),
        tokens=held(tokens) / max(size, 1),
        running=held(running),
        waiting=held(waiting),
        preempted_at=np.repeat(start, [step.preempted for step in steps]) if steps else start,
        capacity=pools[-1].blocks_total if pools else 0,
        block_tokens=size,
    )


def memory_figure(steps: Sequence[StepRecord], *, unit: str = "block") -> Figure:
    """Blocks above, sequences below, on one time axis. `unit` is what a block is called."""
    series = memory_series(steps)
    figure = style.new_figure(5.4)
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    if not steps:
        axes = figure.add_subplot()
        style.tidy(axes)
        style.title(axes, "Memory over time")
        style.nothing(axes, "there is no step to show")
        return figure
    above = figure.add_subplot(grid[0])
    below = figure.add_subplot(grid[1], sharex=above)
    for axes in (above, below):
        style.tidy(axes)
    _blocks(above, series, unit)
    _sequences(below, series)
    above.set_xlim(min(series.at[0], 0), max(series.at[-1], 1e-3))
    above.tick_params(labelbottom=False)
    below.set_xlabel("time, s")
    peak = 100 * float(series.in_use.max()) / max(series.capacity, 1)
    heading = f"At most {peak:.0f} % of {style.count(series.capacity, unit)} in use"
    note = f"a {unit} has {series.block_tokens:,} token slots; between the line and the area's edge they are empty"
    style.title(above, heading, note)
    return figure


def _blocks(axes: Any, series: MemorySeries, unit: str) -> None:
    at, in_use, both, tokens = style.thin(series.at, series.in_use, series.in_use + series.cached, series.tokens)
    axes.fill_between(at, 0, in_use, step="post", color=style.SKY, linewidth=0, label=f"{unit}s in use")
    if series.cached.any():
        label = f"free {unit}s with cached content"
        axes.fill_between(at, in_use, both, step="post", color=style.CACHED, linewidth=0, label=label)
    axes.step(at, tokens, where="post", color=style.BLUE, linewidth=1.4, label=f"tokens stored, in full {unit}s")
    axes.axhline(series.capacity, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)), label="capacity")
    axes.set_ylim(0, series.capacity * 1.06)
    axes.set_ylabel(f"{unit}s")
    style.whole(axes.yaxis)
    style.legend(axes, columns=4, bbox_to_anchor=(0, -0.04))


def _sequences(axes: Any, series: MemorySeries) -> None:
    at, running, waiting = style.thin(series.at, series.running, series.waiting)
    axes.step(at, waiting, where="post", color=style.ORANGE, linewidth=1.6, label="waiting")
    axes.step(at, running, where="post", color=style.BLUE, linewidth=1.6, label="running")
    top, count = max(float(series.running.max()), float(series.waiting.max()), 1.0), len(series.preempted_at)
    axes.set_ylim(0, top * 1.16)
    if count:
        label = f"preemption ({count:,} in all)"
        mark: Any = {"color": style.VERMILION, "markersize": 5, "clip_on": False, "label": label}
        axes.plot(series.preempted_at, np.full(count, top * 1.09), "v", **mark)
    axes.set_ylabel("sequences")
    style.whole(axes.yaxis)
    style.legend(axes, columns=3, bbox_to_anchor=(0, -0.3))
