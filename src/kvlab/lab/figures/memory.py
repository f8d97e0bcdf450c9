"""Memory over time: blocks in use and cached, the tokens in them, and how many sequences run and wait; of an engine
that keeps no steps, what it said of itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineSeries
from kvlab.lab.figures import style
from kvlab.lab.results.tables import count

Column = NDArray[np.float64]
_FAR = 0.1  # of the capacity: where less is used, a scale up to it would show nothing
_LEVELS: tuple[str, ...] = ("kv_usage", "running", "waiting")
_COUNTERS: tuple[str, ...] = ("preemptions", "prefix_queries", "prefix_hits")


class MemorySeries(NamedTuple):
    """A run's memory as step functions of time: the value at `at[i]`, in seconds, holds until `at[i + 1]`. Values
    are numbers of blocks or sequences; `tokens` is how many full blocks the stored tokens would fill.
    """

    at: Column
    in_use: Column
    cached: Column
    tokens: Column
    running: Column
    waiting: Column
    preempted_at: Column  # seconds, one for each preemption
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
    _draw_sequences(below, series.at, {"waiting": series.waiting, "running": series.running}, series.preempted_at)
    above.set_xlim(min(series.at[0], 0), max(series.at[-1], 1e-3))
    below.set_xlabel("time, s")
    share = float(series.in_use.max()) / max(series.capacity, 1)
    heading = f"At most {style.percent(share)} of {count(series.capacity, unit)} in use"
    note = f"a {unit} has {series.block_tokens:,} token slots; those between line and edge hold no token"
    if _highest(series) < _FAR * series.capacity:
        note += "; the capacity is far above"
    style.title(above, heading, note)
    return figure


def told_memory_figure(series: EngineSeries) -> Figure:
    """The share of an engine's KV cache in use, its requests, and what it found in its prefix cache: each where it
    told that from time to time. `told_columns` are not empty.
    """
    at, told = np.asarray(series.times_s), told_columns(series)
    sequences: dict[str, Column] = {name: told[name] for name in ("waiting", "running") if name in told}
    has_prefixes = bool(told.get("prefix_queries", np.zeros(0)).any())
    ratios = [3] * ("kv_usage" in told) + [2] * bool(sequences) + [2] * has_prefixes
    figure = style.new_figure(1.4 + 0.8 * sum(ratios))
    all_axes = list(figure.subplots(len(ratios), 1, height_ratios=ratios, sharex=True, squeeze=False)[:, 0])
    for axes in all_axes:
        style.tidy(axes)
    heading, rest = "The engine's sequences", iter(all_axes)
    if "kv_usage" in told:
        heading = f"At most {style.percent(told['kv_usage'].max())} of the KV cache in use"
        _draw_usage(next(rest), at, told["kv_usage"])
    if sequences:
        gained = np.maximum(np.diff(told.get("preemptions", np.zeros(len(at)))), 0)
        preempted_at = np.repeat(at[1:], gained.astype(int))  # at the first sample that has them
        _draw_sequences(next(rest), at, sequences, preempted_at, below=-0.06 if has_prefixes else -0.3)
    if has_prefixes:
        _draw_prefixes(next(rest), at, told["prefix_queries"], told.get("prefix_hits", np.zeros(len(at))))
    style.title(all_axes[0], heading, f"as the engine told, {len(at):,} times")
    all_axes[0].set_xlim(min(at[0], 0), max(at[-1], 1e-3))
    all_axes[-1].set_xlabel("time, s")
    return figure


def told_columns(series: EngineSeries) -> dict[str, Column]:
    """The columns of a series that `told_memory_figure` draws; counters count from the first sample."""
    known = {name: np.asarray(values, dtype=float) for name, values in series.columns.items() if len(values)}
    shown: dict[str, Column] = {name: known[name] for name in _LEVELS if name in known}
    if shown:
        shown |= {name: known[name] - known[name][0] for name in _COUNTERS if name in known}
    return shown


def _draw_blocks(axes: Any, series: MemorySeries, unit: str) -> None:
    at, in_use, both, tokens = style.thin(series.at, series.in_use, series.in_use + series.cached, series.tokens)
    area: Any = {"step": "post", "linewidth": 0}
    axes.fill_between(at, 0, in_use, color=style.SKY, label=f"{unit}s in use", **area)
    if series.cached.any():
        label = f"free {unit}s with cached content"
        axes.fill_between(at, in_use, both, color=style.CACHED, label=label, **area)
    axes.step(at, tokens, where="post", color=style.BLUE, linewidth=1.4, label=f"stored tokens, as full {unit}s")
    top = _highest(series)
    if top >= _FAR * series.capacity:
        top = series.capacity
        axes.axhline(top, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)), label="capacity")
    axes.set(ylim=(0, max(top, 1) * 1.06), ylabel=f"{unit}s")
    style.whole(axes.yaxis)
    style.legend(axes, columns=4, below=-0.04)


def _highest(series: MemorySeries) -> float:
    """The most blocks with anything in them."""
    return float((series.in_use + series.cached).max())


def _draw_usage(axes: Any, at: Column, usage: Column) -> None:
    times, share = style.thin(at, 100 * usage)
    axes.fill_between(times, 0, share, color=style.SKY, label="KV cache in use", step="post", linewidth=0)
    axes.axhline(100, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)), label="capacity")
    axes.set(ylim=(0, 106), ylabel="% of the KV cache")
    style.legend(axes, columns=2, below=-0.04)


def _draw_prefixes(axes: Any, at: Column, queries: Column, hits: Column) -> None:
    times, asked, hit = style.thin(at, queries, hits)
    axes.step(times, asked, where="post", color=style.FAINT, linewidth=1.6, label="prompt tokens looked up so far")
    axes.step(times, hit, where="post", color=style.GREEN, linewidth=1.6, label="found in the prefix cache")
    axes.set(ylim=(0, max(float(asked.max()), 1.0) * 1.06), ylabel="tokens")
    style.whole(axes.yaxis)
    style.legend(axes, columns=2, below=-0.3)


def _draw_sequences(
    axes: Any, at: Column, lines: Mapping[str, Column], preempted_at: Column, *, below: float = -0.3
) -> None:
    """The lines `running` and `waiting`, or one of them, and a mark for each preemption."""
    times, *thinned = style.thin(at, *lines.values())
    width = 1.6 if len(times) == len(at) else 0.7  # between the extremes of each moment
    for name, values in zip(lines, thinned, strict=True):
        colour = {"waiting": style.ORANGE, "running": style.BLUE}[name]
        axes.step(times, values, where="post", color=colour, linewidth=width, label=name)
    top, count = max(1.0, *(float(values.max()) for values in lines.values())), len(preempted_at)
    axes.set(ylim=(0, top * 1.16), ylabel="sequences")
    if count:
        label = f"preemption ({count:,} in all)"
        mark: Any = {"color": style.VERMILION, "markersize": 5, "clip_on": False, "label": label}
        axes.plot(preempted_at, np.full(count, top * 1.09), "v", **mark)
    style.whole(axes.yaxis)
    style.legend(axes, columns=3, below=below)
