"""Which sequence held which block when: a run's block events as intervals of steps, and as a grid of cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.journal import BlockEvent, BlockEvents

FREE, CACHED, UNKNOWN, SHARED = -1, -2, -3, -4  # any other holder of a block is a sequence's number


class Stretches(NamedTuple):
    """From step `start` to the beginning of step `end`, `block` was held by `holder`: a sequence's number, or
    CACHED, SHARED (by several) or UNKNOWN (by none that the journal names). At other times a block is free.
    """

    block: NDArray[np.int64]
    holder: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def stretches(events: BlockEvents, num_steps: int) -> Stretches:
    """Follow each block through its events. A block's last stretch ends with the last step."""
    references: defaultdict[int, list[int]] = defaultdict(list)
    cached: set[int] = set()
    current: dict[int, tuple[int, int]] = {}  # block: holder, since which step
    found: list[tuple[int, int, int, int]] = []
    columns = (events.step.tolist(), events.event.tolist(), events.block.tolist(), events.sequence.tolist())
    for step, event, block, sequence in zip(*columns, strict=True):
        held = references[block]
        if event == BlockEvent.FREED:
            if held:
                held.remove(sequence if sequence in held else held[-1])
        elif event == BlockEvent.CACHED:
            cached.add(block)
        else:
            cached.discard(block)
            if event == BlockEvent.ALLOCATED:
                held[:] = [sequence]
            elif event == BlockEvent.SHARED:
                held.append(sequence)
        holder = CACHED if block in cached else FREE
        if held:
            holder = SHARED if len(held) > 1 else held[0] if held[0] >= 0 else UNKNOWN
        before, since = current.get(block, (FREE, step))
        if holder != before:
            found.append((block, before, since, step))
            current[block] = (holder, step)
    found += [(block, holder, since, num_steps) for block, (holder, since) in current.items()]
    # A stretch of no length leads to the next holder within a step. It is kept for a sequence alone, which may have
    # come and gone within that step.
    found = [each for each in found if each[1] != FREE and (each[3] > each[2] or each[1] >= 0)]
    return Stretches(*np.array(found, dtype=np.int64).reshape(-1, 4).T)


class PoolGrid(NamedTuple):
    """The pool as cells `[rows, columns]`: FREE, CACHED, SHARED, UNKNOWN or a sequence's number.

    A row is `blocks_per_row` blocks, a column `end_s / columns` seconds. A cell is in use if one of its blocks is
    at any moment of it, else cached if one is: no block that was used is lost. `in_use` and `cached` are the shares
    of its blocks that were so, 0 to 1.
    """

    cells: NDArray[np.int64]
    in_use: NDArray[np.float64]
    cached: NDArray[np.float64]
    blocks_per_row: int
    num_blocks: int
    end_s: float


def pool_grid(
    found: Stretches,
    num_blocks: int,
    step_starts: Sequence[float],
    end_s: float,
    *,
    most_rows: int = 400,
    most_columns: int = 800,
) -> PoolGrid:
    """Stretches on a grid of at most `most_rows` x `most_columns`. Steps that began at one time share a column."""
    per_row = -(-num_blocks // most_rows)
    rows = -(-num_blocks // per_row)
    columns = most_columns if end_s > 0 else 1
    cells = np.full((rows, columns), FREE, dtype=np.int64)
    borders = np.append(step_starts, end_s) * (columns / end_s if end_s > 0 else 0.0)
    last = len(borders) - 1
    first = np.clip(np.floor(borders[np.minimum(found.start, last)]).astype(np.int64), 0, columns - 1)
    until = np.clip(np.ceil(borders[np.minimum(found.end, last)]).astype(np.int64), first + 1, columns)
    # What is painted last stays: held above cached, shared on top, else the later sequence.
    counts = np.zeros((2, rows * columns))  # in use, cached
    rank = np.select([found.holder == CACHED, found.holder == SHARED], [0, 2], 1)
    for level in range(3):
        chosen = np.flatnonzero(rank == level)
        chosen = chosen[np.argsort(found.start[chosen], kind="stable")]
        for part in np.array_split(chosen, max(len(chosen) // 100_000, 1)):  # to limit the memory that it takes
            lengths = until[part] - first[part]
            column = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths - first[part], lengths)
            row = np.repeat(found.block[part] // per_row, lengths)
            cells[row, column] = np.repeat(found.holder[part], lengths)
            counts[int(level == 0)] += np.bincount(row * columns + column, minlength=rows * columns)
    in_use, cached = np.minimum(counts.reshape(2, rows, columns) / per_row, 1)
    return PoolGrid(cells, in_use, np.minimum(cached, 1 - in_use), per_row, num_blocks, end_s)


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
