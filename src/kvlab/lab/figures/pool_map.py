"""A map of the pool: each block over time, in the colour of the sequence that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvlab.core import StepRecord
from kvlab.kv.journal import BlockEvents
from kvlab.lab.figures import style
from kvlab.lab.figures.blocks import CACHED, FREE, SHARED, UNKNOWN, PoolGrid, colour_numbers, pool_grid, stretches

_PALEST = 0.35  # of a colour, where a single block of a row is in use

#: What a block is for that no single known sequence holds: words and colour.
HOLDERS = {
    FREE: ("free", style.FREE),
    SHARED: ("shared by several sequences", style.SHARED),
    CACHED: ("free, content cached", style.CACHED),
    UNKNOWN: ("held by no known sequence", style.FAINT),
}


def run_grid(
    events: BlockEvents, steps: Sequence[StepRecord], *, most_rows: int = 400, most_columns: int = 800
) -> PoolGrid:
    """A run's pool as a grid of at most so many cells."""
    starts = [step.start_s for step in steps]
    end = steps[-1].end_s if steps else 0.0
    pool = steps[-1].pool if steps else None
    blocks = pool.blocks_total if pool is not None else 1
    return pool_grid(
        stretches(events, len(steps)), blocks, starts, end, most_rows=most_rows, most_columns=most_columns
    )


def pool_image(grid: PoolGrid) -> NDArray[np.uint8]:
    """The grid in colours, [rows, columns, 3]. Where a row is several blocks, it is paler the fewer of them are in
    use, yet never so pale that one that is could not be seen.
    """
    colours = {holder: to_rgb(colour) for holder, (_, colour) in HOLDERS.items()}
    for sequence, number in colour_numbers(grid.cells, len(style.SEQUENCES)).items():
        colours[sequence] = to_rgb(style.SEQUENCES[number])
    values, where = np.unique(grid.cells, return_inverse=True)
    palette = np.array([colours[int(value)] for value in values])
    painted = palette[where.reshape(grid.cells.shape)]
    if grid.blocks_per_row > 1:
        used, cached = grid.in_use[..., None], grid.cached[..., None]
        free = np.clip(1 - used - cached, 0, 1)
        grey, white = np.array(to_rgb(style.CACHED)), np.array(to_rgb(style.FREE))
        rest = (grey * cached + white * free) / (cached + free + 1e-9)
        weight = np.where(used > 0, np.maximum(used, _PALEST), 0)
        painted = painted * weight + rest * (1 - weight)
    image: NDArray[np.uint8] = (255 * painted).round().astype(np.uint8)
    return image


def pool_map_figure(events: BlockEvents | None, steps: Sequence[StepRecord], *, unit: str = "block") -> Figure:
    """Block by time."""
    figure = style.new_figure(5.3)
    axes = figure.add_subplot()
    style.tidy(axes, grid="")
    axes.set_xlabel("time, s")
    axes.set_ylabel(f"{unit} of the pool")
    if events is None or not len(events.block) or not steps:
        style.title(axes, f"Who held which {unit}")
        style.nothing(axes, f"no {unit} was handed out" if events is not None else "the run kept no blocks.parquet")
        return figure
    grid = run_grid(events, steps)
    axes.imshow(
        pool_image(grid),
        extent=(0, grid.end_s, grid.cells.shape[0] * grid.blocks_per_row, 0),
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_ylim(grid.num_blocks, 0)
    style.whole(axes.yaxis)
    note = "white is free"
    if grid.blocks_per_row > 1:
        note += f"; a row is {grid.blocks_per_row} {unit}s, paler where fewer of them are in use"
    style.title(axes, f"Who held which of {style.count(grid.num_blocks, unit)}, and when", note)
    _legend(figure, axes, grid)
    return figure


def _legend(figure: Figure, axes: Any, grid: PoolGrid) -> None:
    several = tuple(Patch(color=colour) for colour in style.SEQUENCES[:4])
    handles: list[object] = [several]
    names = ["sequences (colours repeat)"]
    for holder, (name, colour) in HOLDERS.items():
        if holder != FREE and (grid.cells == holder).any():
            handles.append(Patch(color=colour))
            names.append(name)
    style.legend(
        axes,
        handles,
        names,
        columns=4,
        bbox_to_anchor=(0, -0.13),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
