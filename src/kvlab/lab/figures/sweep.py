"""What a sweep's points show together: a metric over the settings that were varied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.lab import catalogue
from kvlab.lab.figures import style

THROUGHPUT = "throughput/output_tokens_per_s"
FAILED = "failed"
_FAR = 1.4  # times the largest median: repeats beyond it are shown at the edge


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a sweep: the settings it was given, what it measured, how it ended."""

    config: Mapping[str, object]
    metrics: Mapping[str, float]
    status: str = "finished"
    name: str = ""


def varied_keys(points: Sequence[Point]) -> list[str]:
    """The settings in which points differ, those of kvlab's own bookkeeping and repeats (`seed`) left out."""
    keys = dict.fromkeys(key for point in points for key in point.config)
    left_out = ("run_name", "tracking.", "tags.", "optimize", "resume", "repeat", "figures", "debug.")
    return [
        key
        for key in keys
        if not key.startswith(left_out)
        and key != "seed"
        and len({_hashable(point.config.get(key)) for point in points}) > 1
    ]


def point_label(point: Point, keys: Sequence[str]) -> str:
    """What tells a point from the others, by its settings without their groups' names."""
    return ", ".join(f"{key.split('.', 1)[-1]}={point.config.get(key)}" for key in keys) or point.name or "run"


def by_settings(points: Sequence[Point], keys: Sequence[str]) -> dict[str, list[Point]]:
    """Points that have these settings alike, repeats of each other, by their label."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point_label(point, keys), []).append(point)
    return groups


def varied_amounts(points: Sequence[Point]) -> list[str]:
    """The one or two settings in which points differ, where they are amounts; else none."""
    keys = varied_keys(points)
    amounts = [key for key in keys if all(is_number(point.config.get(key)) for point in points)]
    return amounts if 1 <= len(keys) == len(amounts) <= 2 else []


@dataclass(frozen=True, slots=True)
class Grid:
    """A metric over two settings: medians `[rows, columns]`, NaN where there is none, and the share of points that
    failed in each cell (NaN where no point was).
    """

    rows: list[Any]
    columns: list[Any]
    values: NDArray[np.float64]
    failed: NDArray[np.float64]


def metric_grid(points: Sequence[Point], row_key: str, column_key: str, metric: str) -> Grid:
    """Points by two settings; those that have both settings alike are summed up by their median."""
    rows, columns = ordered(points, row_key), ordered(points, column_key)
    values = np.full((len(rows), len(columns)), math.nan)
    failed = values.copy()
    cells: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        place = rows.index(point.config.get(row_key)), columns.index(point.config.get(column_key))
        cells.setdefault(place, []).append(point)
    for place, members in cells.items():
        known = [value for point in members if (value := usable(point, metric)) is not None]
        failed[place] = 1 - len(known) / len(members)
        if known:
            values[place] = median(known)
    return Grid(rows, columns, values, failed)


def usable(point: Point, metric: str) -> float | None:
    """A finished point's metric, if it has it."""
    value = point.metrics.get(metric) if point.status == "finished" else None
    return None if value is None or math.isnan(value) else value


def ordered(points: Sequence[Point], key: str) -> list[Any]:
    """A setting's values: numbers by size, others as they come."""
    values = list({_hashable(value): value for point in points for value in [point.config.get(key)]}.values())
    return sorted(values) if all(is_number(value) for value in values) else values


def is_number(value: object) -> bool:
    """Whether a setting's value is an amount."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def heat_map(grid: Grid, row_key: str, column_key: str, metric: str) -> Figure:
    """A cell for each pair of values, darker for less; crosses where every point failed."""
    words = catalogue.metric(metric).axis
    height = min(max(1.9 + 0.52 * len(grid.rows), 3.0), 8.0)
    figure = style.new_figure(height)
    axes = figure.add_subplot()
    style.tidy(axes, grid="")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    image: Any = axes.imshow(grid.values, cmap=style.AMOUNTS, aspect="auto")
    finite = grid.values[np.isfinite(grid.values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low == high:
        image.set_clim(low - 1, high + 1)
    small = max(len(grid.rows), len(grid.columns)) > 10
    for (row, column), value in np.ndenumerate(grid.values):
        share = grid.failed[row, column]
        if math.isnan(value):
            text, colour = ("", style.FAINT) if math.isnan(share) else (FAILED, style.VERMILION)
        else:
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            text = style.number(value) + ("*" if share else "")
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7 if small else 9.5)
    axes.set_xticks(range(len(grid.columns)), [style.shorten(str(value), 18) for value in grid.columns])
    axes.set_yticks(range(len(grid.rows)), [style.shorten(str(value), 18) for value in grid.rows])
    axes.set_xlabel(column_key)
    axes.set_ylabel(row_key)
    axes.set_facecolor("#F0F0F0")  # of cells without a value
    note = "* some of its repeats failed" if ((grid.failed > 0) & (grid.failed < 1)).any() else ""
    if len(finite):
        bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=max(height * 4, 12))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=9)
        style.plain(bar.ax.yaxis)
        row, column = np.unravel_index(int(np.nanargmax(grid.values)), grid.values.shape)
        best = f"most: {style.number(high)} at {row_key}={grid.rows[row]}, {column_key}={grid.columns[column]}"
        note = f"{best}; {note}" if note else best
    style.title(axes, f"{words[0].upper()}{words[1:]}", note)
    return figure


def line_chart(points: Sequence[Point], key: str, metric: str) -> Figure:
    """A metric over one amount: the median of each value, and each point."""
    figure = style.new_figure(4.2)
    axes = figure.add_subplot()
    style.tidy(axes, grid="both")
    words = catalogue.metric(metric).axis
    style.title(axes, f"{words[0].upper()}{words[1:]} over {key}")
    axes.set_xlabel(key)
    axes.set_ylabel(words)
    values = ordered(points, key)
    by_value = {
        value: [y for p in points if p.config.get(key) == value and (y := usable(p, metric)) is not None]
        for value in values
    }
    known = [value for value in values if by_value[value]]
    if known:
        axes.plot(known, [median(by_value[value]) for value in known], color=style.BLUE, linewidth=1.6, marker="o")
        flat = [(value, y) for value in known if len(by_value[value]) > 1 for y in by_value[value]]
        if flat:
            axes.plot(
                *zip(*flat, strict=True), linestyle="none", marker="o", markersize=4, color=style.SKY, zorder=1
            )
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) > 2 and max(values) / min(values) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max((y for value in known for y in by_value[value]), default=1.0))
    style.plain(axes.yaxis)
    _mark_failed(axes, [(value, value) for value in values if not by_value[value]])
    return figure


def bars(points: Sequence[Point], keys: Sequence[str], metric: str) -> Figure:
    """A bar for each point, or each set of repeats, by the settings in which they differ."""
    words = catalogue.metric(metric).axis
    groups = by_settings(points, keys)
    figure = style.new_figure(min(1.5 + 0.42 * len(groups), 12.0))
    axes = figure.add_subplot()
    style.tidy(axes, grid="x")
    axes.set_xlabel(words)
    style.title(axes, f"{words[0].upper()}{words[1:]}")
    heights = [median(known) if (known := _known(members, metric)) else math.nan for members in groups.values()]
    axes.barh(range(len(groups)), heights, color=style.BLUE, height=0.62)
    top = max((height for height in heights if not math.isnan(height)), default=0.0) or 1.0
    inside = [y for members in groups.values() for y in _known(members, metric) if y <= _FAR * top]
    edge = max([top, *inside])
    any_far = any(y > edge for members in groups.values() for y in _known(members, metric))
    for place, (height, members) in enumerate(zip(heights, groups.values(), strict=True)):
        known = _known(members, metric)
        near, far = [y for y in known if y <= edge], [y for y in known if y > edge]
        mark: Any = {"linestyle": "none", "color": style.BLACK}
        if len(known) > 1:
            axes.plot(near, [place] * len(near), marker="|", markersize=8, **mark)
        if far:
            axes.plot([edge], [place], marker=">", markersize=5, **mark)
        text = style.number(height) + (f" (a repeat: {style.number(max(far))})" if far else "")
        if math.isnan(height):
            axes.text(edge * 0.01, place, FAILED, va="center", color=style.VERMILION, fontsize=9.5)
        else:
            axes.text(
                edge if far else max(known), place, f"  {text}", va="center", fontsize=9.5, color=style.INK
            ).set_in_layout(False)
    axes.set_yticks(range(len(groups)), [style.shorten(label, 56) for label in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(0, edge * (1.5 if any_far else 1.17))
    style.plain(axes.xaxis)
    return figure


def _known(points: Sequence[Point], metric: str) -> list[float]:
    return [value for point in points if (value := usable(point, metric)) is not None]


def _mark_failed(axes: Any, places: Sequence[tuple[float, Any]]) -> None:
    for place, _ in places:
        axes.annotate(
            FAILED,
            (place, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=style.VERMILION,
            fontsize=9,
        )
        axes.plot(
            [place], [0], transform=axes.get_xaxis_transform(), marker="x", color=style.VERMILION, clip_on=False
        )


def _hashable(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
