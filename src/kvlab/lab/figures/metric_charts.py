"""A metric over the settings that were varied: a heat map for two numbers, a line for one, else bars."""

import math
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.figures.points import THROUGHPUT, Grid, Points
from kvlab.lab.results.catalogue import metric as entry_of

FAILED = "failed"
_FAR = 1.4  # times the largest median: repeats beyond it are shown at the edge


def metric_figure(points: Points, metric: str = THROUGHPUT) -> Figure:
    """A metric over what was varied."""
    amounts = points.varied_amounts()
    if len(amounts) == 2:
        return heat_map(points.grid(amounts, metric), metric)
    return line_chart(points, amounts[0], metric) if amounts else bars(points, metric)


def cell_texts(grid: Grid) -> list[list[str]]:
    """What stands in each cell: the value, with a star where some repeats failed, or `failed`, or nothing."""
    return [
        [
            style.number(value) + "*" * bool(share) if not math.isnan(value) else FAILED if share == 1 else ""
            for value, share in zip(values, shares, strict=True)
        ]
        for values, shares in zip(grid.values.tolist(), grid.failed.tolist(), strict=True)
    ]


def heat_map(grid: Grid, metric: str) -> Figure:
    """A cell for each pair of values, darker for less; `failed` where every point did."""
    less_is_better = entry_of(metric).direction.more_is_better is False
    height = min(max(1.9 + 0.52 * len(grid.rows), 3.0), 8.0)
    figure, axes = style.new_axes(height, grid.column_key, grid.row_key, grid="")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_facecolor("#F0F0F0")  # of cells without a value
    image: Any = axes.imshow(grid.values, cmap=style.AMOUNTS, aspect="auto")
    finite = grid.values[np.isfinite(grid.values)]
    if len(finite) and finite.min() == finite.max():
        image.set_clim(finite[0] - 1, finite[0] + 1)
    size = 7 if max(grid.values.shape) > 10 else 9.5
    texts = cell_texts(grid)
    for (row, column), value in np.ndenumerate(grid.values):
        colour = style.VERMILION
        if not math.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(column, row, texts[row][column], ha="center", va="center", color=colour, fontsize=size)
    axes.set_xticks(range(len(grid.columns)), [style.shorten(str(value), 18) for value in grid.columns])
    axes.set_yticks(range(len(grid.rows)), [style.shorten(str(value), 18) for value in grid.rows])
    notes = [grid.footnote] if grid.footnote else []
    if len(finite):
        style.plain(style.colour_bar(figure, axes, image, max(height * 4, 12)).ax.yaxis)
        index = np.nanargmin(grid.values) if less_is_better else np.nanargmax(grid.values)
        row, column = np.unravel_index(int(index), grid.values.shape)
        extreme = f"{'least' if less_is_better else 'most'}: {style.number(grid.values[row, column])}"
        notes.insert(0, f"{extreme} at {grid.row_key}={grid.rows[row]}, {grid.column_key}={grid.columns[column]}")
    style.title(axes, entry_of(metric).axis, "; ".join(notes))
    return figure


def line_chart(points: Points, key: str, metric: str) -> Figure:
    """A metric over one number: the median of each value, and each repeat."""
    label = entry_of(metric).axis
    figure, axes = style.new_axes(4.2, key, label)
    style.title(axes, f"{label} over {key}")
    values = points.values_over(key, metric)
    known = {x: some for x, some in values.items() if some}
    axes.plot(list(known), [median(some) for some in known.values()], color=style.BLUE, linewidth=1.6, marker="o")
    repeats = [(x, y) for x, some in known.items() if len(some) > 1 for y in some]
    axes.plot([x for x, _ in repeats], [y for _, y in repeats], "o", color=style.SKY, markersize=4, zorder=1)
    if len(values) > 2 and min(values) > 0 and max(values) / min(values) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(list(values), [str(x) for x in values])
        axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max((max(some) for some in known.values()), default=1.0))
    style.plain(axes.yaxis)
    bottom, red = axes.get_xaxis_transform(), style.VERMILION
    for x in values.keys() - known.keys():
        axes.plot([x], [0], transform=bottom, marker="x", color=red, clip_on=False)
        axes.annotate(FAILED, (x, 0), (0, 4), bottom, "offset points", ha="center", color=red, fontsize=9)
    return figure


def bars(points: Points, metric: str) -> Figure:
    """A bar for each point, or each set of repeats, by the settings in which they differ."""
    groups = points.by_settings(points.varied_keys())
    values = {label: members.values(metric) for label, members in groups.items()}
    medians = [median(runs) if runs else math.nan for runs in values.values()]
    label = entry_of(metric).axis
    figure, axes = style.new_axes(min(1.5 + 0.42 * len(values), 12.0), label, grid="x")
    style.title(axes, label)
    axes.barh(range(len(values)), medians, color=style.BLUE, height=0.62)
    longest = max((value for value in medians if not math.isnan(value)), default=0.0) or 1.0
    edge = max([longest, *(y for runs in values.values() for y in runs if y <= _FAR * longest)])
    any_far = False
    for row, (middle, runs) in enumerate(zip(medians, values.values(), strict=True)):
        if not runs:
            axes.text(edge * 0.01, row, FAILED, va="center", color=style.VERMILION, fontsize=9.5)
            continue
        text, end = f"  {style.number(middle)}", max(runs)
        if len(runs) > 1:
            near = [y for y in runs if y <= edge]
            axes.plot(near, [row] * len(near), "|", color=style.BLACK, markersize=8)
        if end > edge:
            any_far, text, end = True, f"{text} (a repeat: {style.number(end)})", edge
            axes.plot([edge], [row], ">", color=style.BLACK, markersize=5)
        axes.text(end, row, text, va="center", fontsize=9.5, color=style.INK).set_in_layout(False)
    axes.set_yticks(range(len(values)), [style.shorten(name, 56) for name in values])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, edge * (1.5 if any_far else 1.17))
    style.plain(axes.xaxis)
    return figure
