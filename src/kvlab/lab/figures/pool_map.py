"""A map of the pool: each block over time, in the colour of the sequence that holds it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray

from kvlab.core.step_log import StepLog
from kvlab.kv.journal import BlockEvents
from kvlab.lab.figures import blocks, style
from kvlab.lab.figures.blocks import GridSize, PoolGrid
from kvlab.lab.results.records import RunRecord
from kvlab.lab.results.tables import count

_FEW = 0.1  # of a pool's blocks: where fewer were used, a map of all would show nothing
_PALEST = 0.35  # of a colour, where a single block of a row is in use
_PALEST_ALONE = 0.1  # of the one colour that all sequences have, which no other has to be told from

PICTURE = GridSize(400, 800)
#: Words and colour of each holder that is not a single known sequence.
HOLDERS = {
    blocks.FREE: ("free", style.FREE),
    blocks.SHARED: ("shared by several sequences", style.SHARED),
    blocks.CACHED: ("free, content cached", style.CACHED),
    blocks.PINNED: ("free, content pinned", style.PINNED),
    blocks.UNKNOWN: ("held by no known sequence", style.FAINT),
}


class RunGrids(NamedTuple):
    """A run's pool as a grid for a picture, and as a coarser one for a page, where each cell is text."""

    picture: PoolGrid
    page: PoolGrid


def run_grids(
    events: BlockEvents, steps: StepLog, sizes: Sequence[GridSize], tenants: NDArray[np.int64] | None = None
) -> list[PoolGrid]:
    """A run's pool as grids of these sizes."""
    last = steps[-1]
    total = last.pool.blocks_total if last.pool else 1
    # Where few of a pool's blocks were ever used, those up to the last of them are drawn.
    used = int(events.block.max()) + 1 if len(events.block) else total
    shown = used if used < _FEW * total else total
    grids = blocks.pool_grids(events, shown, steps.column("start_s"), last.end_s, sizes, tenants)
    return [grid._replace(pool_blocks=total) for grid in grids]


def record_grids(record: RunRecord) -> RunGrids | None:
    """The grids of a recorded run, made when first asked for; None where there is nothing to show."""
    events, steps = record.blocks(), record.steps()
    if events is None or not len(events.block) or not steps:
        return None
    return record.once("grids", lambda: RunGrids(*run_grids(events, steps, [PICTURE, GridSize(200, 320)])))


def has_one_colour(grid: PoolGrid) -> bool:
    """Whether all sequences have the same colour: with more of them than columns none could be told from others."""
    columns: int = grid.cells.shape[1]
    return len(np.unique(grid.cells[grid.cells >= 0])) > columns


def holder_colours(grid: PoolGrid) -> dict[int, str]:
    """The colour of each holder and each sequence of a grid."""
    colours = {holder: colour for holder, (_, colour) in HOLDERS.items()}
    if has_one_colour(grid):
        return colours | dict.fromkeys(np.unique(grid.cells[grid.cells >= 0]).tolist(), style.BLUE)
    numbers = blocks.colour_numbers(grid.cells, len(style.SEQUENCES))
    return colours | {sequence: style.SEQUENCES[number] for sequence, number in numbers.items()}


def pool_image(grid: PoolGrid) -> NDArray[np.uint8]:
    """The grid in colours, [rows, columns, 3]. Where a row is several blocks, a cell is paler the fewer of them are
    in use, but never too pale to be seen.
    """
    painted = _painted(grid, {holder: to_rgb(colour) for holder, colour in holder_colours(grid).items()})
    if grid.blocks_per_row > 1:
        kept = np.where(grid.cells == blocks.PINNED, grid.cached, 0)
        used, cached = (grid.in_use + kept)[..., None], (grid.cached - kept)[..., None]
        free = np.clip(1 - used - cached, 0, 1)
        grey, white = np.array(to_rgb(style.CACHED)), np.array(to_rgb(style.FREE))
        rest = (grey * cached + white * free) / (cached + free + 1e-9)
        palest = _PALEST_ALONE if has_one_colour(grid) else _PALEST
        weight = np.where(used > 0, np.maximum(used, palest), 0)
        painted = painted * weight + rest * (1 - weight)
    image: NDArray[np.uint8] = (255 * painted).round().astype(np.uint8)
    return image


def pool_map_figure(grid: PoolGrid | None, *, unit: str = "block") -> Figure:
    """Block by time; None: no block was allocated."""
    if grid is None:
        figure, axes = style.new_axes(5.3, "time, s", f"{unit} of the pool", grid="")
        style.title(axes, f"Each {unit} of the pool over time")
        style.nothing(axes, f"no {unit} was allocated")
        return figure
    note = "white is free"
    if grid.blocks_per_row > 1:
        note += f"; a row is {grid.blocks_per_row} {unit}s, paler where fewer of them are in use"
    one = has_one_colour(grid)
    what = "free, cached and in use" if one else "by the sequence that holds them"
    figure, axes = _pool_axes(grid, pool_image(grid), unit, what, note)
    present = [HOLDERS[holder] for holder in HOLDERS if holder != blocks.FREE and (grid.cells == holder).any()]
    several = tuple(Patch(color=colour) for colour in ([style.BLUE] if one else style.SEQUENCES[:4]))
    handles = [several, *(Patch(color=colour) for _, colour in present)]
    names = ["in use" if one else "sequences (colours repeat)", *(name for name, _ in present)]
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    columns = 4 if len(handles) < 4 else 3
    style.legend(axes, handles, names, columns=columns, below=-0.13, handler_map=side_by_side)
    return figure


def tenant_map_figure(record: RunRecord, *, unit: str = "block") -> Figure | None:
    """Block by time in the colours of tenants, pale where the block is cached, dark where it is pinned and cached.
    None for a run whose requests have no salt, or that kept no record of blocks.
    """
    events, steps, salts = record.blocks(), record.steps(), [request.salt for request in record.requests()]
    if events is None or not len(events.block) or not steps or not any(salts):
        return None
    names = list(dict.fromkeys(salts))
    (grid,) = run_grids(events, steps, [PICTURE], np.array([names.index(salt) for salt in salts]))
    colours: dict[int, ArrayLike] = {blocks.FREE: to_rgb(style.FREE)}
    for number in np.unique(grid.cells[grid.cells >= 0]).tolist():
        tenant, state = divmod(number, blocks.TENANT_STATES)
        colour = np.array(to_rgb(style.SEQUENCES[tenant % len(style.SEQUENCES)]))
        colours[number] = (colour, 0.7 + 0.3 * colour, 0.55 * colour)[state]  # in use, cached, pinned and cached
    weight = np.where(grid.in_use > 0, np.maximum(grid.in_use, _PALEST), 0)[..., None]
    image = _painted(grid, colours) * weight + 1 - weight
    note = "full colour: in use; pale: free, content cached; dark: free, content pinned; white: free"
    figure, axes = _pool_axes(grid, image, unit, "by the salt of their tenant", note)
    shown = [str(name or "no salt")[:20] for name in names[: len(style.SEQUENCES)]]
    shown[-1] += ", ..." if len(names) > len(shown) else ""
    handles = [Patch(color=colour) for colour in style.SEQUENCES[: len(shown)]]
    style.legend(axes, handles, shown, columns=len(shown), below=-0.13)
    return figure


def _painted(grid: PoolGrid, colours: Mapping[int, ArrayLike]) -> NDArray[np.float64]:
    """The cells in the colours of their holders, [rows, columns, 3]."""
    values, where = np.unique(grid.cells, return_inverse=True)
    return np.array([colours[value] for value in values.tolist()])[where.reshape(grid.cells.shape)]


def _pool_axes(grid: PoolGrid, image: NDArray[Any], unit: str, what: str, note: str) -> tuple[Figure, Axes]:
    """A figure with the image of a grid, block by time, and its title."""
    figure, axes = style.new_axes(5.3, "time, s", f"{unit} of the pool", grid="")
    extent = (0, grid.end_s, len(grid.cells) * grid.blocks_per_row, 0)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_ylim(grid.num_blocks, 0)
    style.whole(axes.yaxis)
    of = count(grid.num_blocks, unit)
    if grid.num_blocks < grid.pool_blocks:
        of, note = f"{grid.num_blocks:,} of {count(grid.pool_blocks, unit)}", f"{note}; the others were never used"
    style.title(axes, f"{of} of the pool over time, {what}", note)
    return figure, axes
