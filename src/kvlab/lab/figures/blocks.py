"""Which sequence held which block when: a run's block events as intervals of steps, and as a grid of cells."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.kv.journal import BlockEvent, BlockEvents

FREE, CACHED, UNKNOWN, SHARED, PINNED = range(-1, -6, -1)  # any other holder of a block is a sequence's number
TENANT_STATES = 3  # a tenant's blocks are in use, cached, or pinned and cached: so many numbers for each tenant


class Stretches(NamedTuple):
    """From step `start` to the beginning of step `end`, `block` was held by `holder`: a sequence's number, or
    CACHED, PINNED, SHARED (by several) or UNKNOWN (by none that the journal names). At other times a block is free.
    """

    block: NDArray[np.int32]
    holder: NDArray[np.int32]
    start: NDArray[np.int32]
    end: NDArray[np.int32]


_TOGETHER = 2**21  # events that are followed at once, so that memory does not grow with the run


def stretches(events: BlockEvents, num_steps: int, tenants: NDArray[np.int64] | None = None) -> Stretches:
    """Follow each block through its events; a block's stretches stand together, in order. Its last ends with the
    last step. With the number of each sequence's tenant, a holder is that times TENANT_STATES, and the state.
    """
    low, high = int(events.block.min(initial=0)), int(events.block.max(initial=0))
    narrow = (events.block - low).astype(np.min_scalar_type(high - low))  # numbers of 16 bits sort by their digits
    events = events.take(np.argsort(narrow, kind="stable"))
    holder = _holders(events) if tenants is None else _tenant_holders(events, tenants)
    return _held(events.block, holder, events.step, num_steps)


def _held(
    block: NDArray[np.int32], holder: NDArray[np.int32], step: NDArray[np.int32], num_steps: int
) -> Stretches:
    """The stretches of blocks, by their holders after each event; a block's events stand together, in order."""
    before = np.where(_begins(block), FREE, np.append(FREE, holder[:-1])[: len(block)])
    changes = np.flatnonzero(holder != before)
    block, holder, step = block[changes], holder[changes], step[changes]
    end = np.full(len(block), num_steps, dtype=np.int32)
    followed = np.flatnonzero(block[1:] == block[:-1])
    end[followed] = step[followed + 1]
    # A stretch of no length leads to the next holder within a step. It is kept for a sequence alone, which may have
    # come and gone within that step.
    kept = np.flatnonzero((holder != FREE) & ((end > step) | (holder >= 0)))
    return Stretches(block[kept], holder[kept], step[kept], end[kept])


def _begins(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values differ from the one before them; the first does."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _ranges(first: NDArray[Any], length: NDArray[Any]) -> NDArray[np.int64]:
    """The whole numbers of several ranges, one range after the other."""
    numbers: NDArray[np.int64] = np.arange(length.sum()) + np.repeat(first - (np.cumsum(length) - length), length)
    return numbers


def _holders(events: BlockEvents) -> NDArray[np.int32]:
    """The holder of a block after each of its events; a block's events stand together, in order."""
    event, sequence = events.event, events.sequence
    references, sign = _references(events)
    holder = np.where(event == BlockEvent.CACHED, np.int32(CACHED), np.int32(FREE))
    holder[event == BlockEvent.PINNED] = PINNED
    holder[references > 1] = SHARED
    alone = references == 1
    holder[alone] = sequence[alone]
    # Who is left of several: the sum of the numbers that came less those that went since the block was free.
    left = np.flatnonzero(alone & (event == BlockEvent.FREED))
    if len(left):
        came = np.cumsum(sign * sequence.astype(np.int64))
        starts = np.flatnonzero((sign > 0) & (references == 1))
        start = starts[np.searchsorted(starts, left) - 1]
        remaining = came[left] - came[start] + sequence[start]
        holder[left] = np.where(sequence[left] < 0, UNKNOWN, remaining)
    holder[alone & (holder < 0)] = UNKNOWN
    return holder


def _references(events: BlockEvents) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    """How many references a block has after each event, and how many that is more than before."""
    block, event = events.block, events.event
    taken = (event == BlockEvent.ALLOCATED) | (event == BlockEvent.SHARED)
    sign = taken.view(np.int8) - (event == BlockEvent.FREED).view(np.int8)
    total = np.cumsum(sign, dtype=np.int32)
    firsts = np.flatnonzero(_begins(block))
    return total - np.repeat(total[firsts] - sign[firsts], np.diff(firsts, append=len(block))), sign


def _tenant_holders(events: BlockEvents, tenants: NDArray[np.int64]) -> NDArray[np.int32]:
    """The tenant and state of a block after each event; a cached block is of the tenant that had it last."""
    event, sequence = events.event, events.sequence
    latest = np.maximum.accumulate(np.where(sequence >= 0, np.arange(len(event)), 0))
    state = np.select([event == BlockEvent.CACHED, event == BlockEvent.PINNED], [1, 2], -1)
    state[_references(events)[0] > 0] = 0
    holder: NDArray[np.int32] = (TENANT_STATES * tenants[sequence[latest]] + state).astype(np.int32)
    holder[state < 0] = FREE
    return holder


class PoolGrid(NamedTuple):
    """The pool as cells `[rows, columns]`: FREE, CACHED, PINNED, SHARED, UNKNOWN or a sequence's number; or, of
    tenants, the holders that `stretches` gives.

    A row is `blocks_per_row` blocks, a column `end_s / columns` seconds. A cell is in use if one of its blocks is
    at any moment of it, else pinned or cached if one is: no block that was used is lost. `in_use` and `cached` are
    the shares of its blocks that were so, 0 to 1.
    """

    cells: NDArray[np.int64]
    in_use: NDArray[np.float64]
    cached: NDArray[np.float64]
    blocks_per_row: int
    num_blocks: int
    end_s: float
    pool_blocks: int = 0  # where the grid has the pool's first blocks alone: how many the pool has


class GridSize(NamedTuple):
    """The most cells that a grid may have."""

    rows: int
    columns: int


def pool_grids(
    events: BlockEvents,
    num_blocks: int,
    step_starts: ArrayLike,
    end_s: float,
    sizes: Sequence[GridSize],
    tenants: NDArray[np.int64] | None = None,
) -> list[PoolGrid]:
    """A run on grids of several sizes, for which the events are followed once; `tenants` as in `stretches`. Steps
    that began at one time share a column.
    """
    starts = np.asarray(step_starts, dtype=np.float64)
    canvases = [_Canvas(num_blocks, starts, end_s, size) for size in sizes]
    share = min(_TOGETHER / max(len(events.block), 1), 1)
    together = max(int(num_blocks * share), -(-num_blocks // 256))
    parts = (events.block // together).astype(np.uint8)
    for part in range(-(-num_blocks // together)):
        held = stretches(events.take(np.flatnonzero(parts == part)), len(starts), tenants)
        if not len(held.block):
            continue
        kind = np.full(len(held.block), _ALONE, dtype=np.int64)
        for holder, number in ((CACHED, _CACHED), (SHARED, _SHARED), (PINNED, _PINNED)):
            kind[held.holder == holder] = number
        alone = np.flatnonzero(kind == _ALONE)
        alone = alone[np.argsort(held.start[alone], kind="stable")]  # what is painted last stays
        for canvas in canvases:
            canvas.paint(held, kind, alone)
    return [canvas.grid() for canvas in canvases]


_ALONE, _CACHED, _SHARED, _PINNED, _KINDS = range(5)


class _Canvas:
    """A grid to which the stretches of some blocks are added after those of the blocks before them."""

    def __init__(self, num_blocks: int, starts: NDArray[np.float64], end_s: float, size: GridSize) -> None:
        self._per_row = -(-num_blocks // size.rows)
        rows, columns = -(-num_blocks // self._per_row), size.columns if end_s > 0 else 1
        borders = np.append(starts, end_s) * (columns / end_s if end_s > 0 else 0.0)
        self._first = np.clip(np.floor(borders), 0, columns - 1).astype(np.int32)  # column in which a step begins
        self._until = np.clip(np.ceil(borders), 1, columns).astype(np.int32)  # the one behind those before a step
        self._num_blocks, self._end_s = num_blocks, end_s
        self._sequences = np.full((rows, columns), FREE, dtype=np.int64)  # of those that hold a cell, the latest
        self._since = np.full((rows, columns), -1, dtype=np.int32)  # the step in which it came
        self._counts = np.zeros((_KINDS, rows, columns), dtype=np.int64)  # of blocks that are held, in each way

    def paint(self, held: Stretches, kind: NDArray[np.int64], alone: NDArray[np.int64]) -> None:
        """Add stretches, of each of which the kind is given, and the rows of those _ALONE, in the order of their
        starts.
        """
        touched = slice(int(held.block.min()) // self._per_row, int(held.block.max()) // self._per_row + 1)
        columns = self._since.shape[1]
        shape = (touched.stop - touched.start, columns)
        row = (np.arange(self._num_blocks) // self._per_row - touched.start)[held.block]
        begin = self._first[np.minimum(held.start, len(self._first) - 1)]
        end = np.maximum(self._until[np.minimum(held.end, len(self._until) - 1)], begin + 1)
        self._counts[:, touched] += _covered(kind * shape[0] + row, begin, end, (_KINDS, *shape))
        first, lengths = row[alone] * columns + begin[alone], end[alone] - begin[alone]
        latest = np.full(shape, -1, dtype=np.int64)
        latest.reshape(-1)[_ranges(first, lengths)] = np.repeat(alone, lengths)
        since = np.where(latest >= 0, held.start[latest], -1)
        later = (latest >= 0) & (since >= self._since[touched])
        self._sequences[touched][later] = held.holder[latest[later]]
        self._since[touched][later] = since[later]

    def grid(self) -> PoolGrid:
        """Held is above pinned, that above cached, shared on top, else the later sequence."""
        alone, cached_blocks, shared, pinned = self._counts
        cells = np.where(cached_blocks > 0, CACHED, FREE)
        cells[pinned > 0] = PINNED
        cells = np.where(self._since >= 0, self._sequences, cells)
        cells[shared > 0] = SHARED
        in_use, cached = (
            np.minimum(blocks / self._per_row, 1) for blocks in (alone + shared, cached_blocks + pinned)
        )
        cached = np.minimum(cached, 1 - in_use)
        return PoolGrid(cells, in_use, cached, self._per_row, self._num_blocks, self._end_s)


def _covered(
    rows: NDArray[np.int64], begin: NDArray[np.int32], end: NDArray[np.int32], shape: tuple[int, int, int]
) -> NDArray[np.int64]:
    """How many boxes cover each cell of several grids of one size. A box is one row, from column `begin` to before
    `end`; rows are numbered on from grid to grid.
    """
    kinds, height, columns = shape
    first, size = rows * (columns + 1), kinds * height * (columns + 1)
    edges = np.bincount(first + begin, minlength=size) - np.bincount(first + end, minlength=size)
    return edges.reshape(kinds, height, -1).cumsum(axis=2)[..., :-1]


def colour_numbers(cells: NDArray[np.int64], colours: int) -> dict[int, int]:
    """A colour number for each sequence in a grid, so that neighbours differ as far as `colours` allow.

    Greedy, in the order of the sequences: the colour that touches its own least, and of those the next in turn.
    """
    touching: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for one, other in ((cells[1:], cells[:-1]), (cells[:, 1:], cells[:, :-1])):
        both = (one >= 0) & (other >= 0) & (one != other)
        pairs, counts = np.unique(np.stack([one[both], other[both]]), axis=1, return_counts=True)
        for first, second, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            touching[first][second] += count
            touching[second][first] += count
    chosen: dict[int, int] = {}
    for turn, sequence in enumerate(np.unique(cells[cells >= 0]).tolist()):
        cost = [0] * colours
        for neighbour, count in touching[sequence].items():
            if neighbour in chosen:
                cost[chosen[neighbour]] += count
        chosen[sequence] = min(range(colours), key=lambda c: (cost[c], (c - turn) % colours))
    return chosen
