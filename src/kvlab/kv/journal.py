"""What happened to each block, in order: the numbers behind a map of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: A sample of a request: (request_id, sample).
Owner = tuple[str, int]

_ASSIGNED = -1  # the kind of an entry that names a slot's owner
_MOST_RECENT = 2**16  # numbers that stay Python's own, some 36 bytes each, until they are packed


class BlockState(IntEnum):
    """What a block is to its pool."""

    FREE = 0  # nobody references it, and it holds nothing that could be shared
    CACHED = 1  # nobody references it, but it holds content
    IN_USE = 2  # one reference
    SHARED = 3  # several
    PINNED = 4  # nobody references it, but it holds content that is to stay


class BlockEvent(IntEnum):
    """What happened to a block."""

    ALLOCATED = 0  # handed out, with one reference; what it held is gone
    SHARED = 1  # one more reference
    FREED = 2  # one reference less
    CACHED = 3  # nothing references it, and its content is kept
    DROPPED = 4  # nothing references it, and its content is given up
    PINNED = 5  # nothing references it, and its content is kept when others' is given up


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """A journal as columns, an entry for each event of a block, in order. `sequence` is the index of the slot's
    owner in a list of owners, -1 where there is none.
    """

    step: NDArray[np.int32]
    event: NDArray[np.int8]
    block: NDArray[np.int32]
    sequence: NDArray[np.int32]

    def take(self, rows: NDArray[np.int64]) -> BlockEvents:
        """These entries, in this order."""
        return BlockEvents(self.step[rows], self.event[rows], self.block[rows], self.sequence[rows])


@dataclass(slots=True)
class _Use:
    """A slot from its first block to its last."""

    owner: int = -1
    blocks: int = 0


class BlockJournal:
    """A record of events that the allocator keeps where it is given one; the engine adds each slot's owner.

    While a run goes on this is one list of integers, (kind, slot, number of blocks, the blocks ...) for each event:
    some 100 ns for a call. It is packed from time to time, 4 bytes a number; `columns` interprets it afterwards.
    """

    def __init__(self) -> None:
        self.owners: list[Owner] = []  # in the order of their assignment; one that comes back stands there again
        self._events: list[int] = []  # since they were packed last
        self._packed = array("i")
        self._marks = array("q", [0])  # where each step's events end

    def add(self, event: BlockEvent, blocks: Sequence[int], owner: Hashable = None) -> None:
        """These blocks had this event; `owner` is the slot whose references they are."""
        self._events += (event, owner if type(owner) is int else -1, len(blocks))
        self._events += blocks

    def assign(self, slot: int, owner: Owner) -> None:
        """The slot that was opened last under this number is this owner's."""
        self._events += (_ASSIGNED, slot, 1, len(self.owners))
        self.owners.append(owner)

    def end_step(self) -> None:
        """Attribute the events since the last call to one step."""
        self._marks.append(len(self._packed) + len(self._events))
        if len(self._events) > _MOST_RECENT:
            self._packed.fromlist(self._events)
            self._events.clear()

    def columns(self, owners: Iterable[Owner] | None = None) -> BlockEvents:
        """The events so far, `sequence` as index of `owners`, by default the journal's own. Events behind the last
        `end_step` belong to one more step.
        """
        kinds, steps, counts, heads = array("b"), array("i"), array("i"), array("q")
        uses: list[_Use] = []
        open_: dict[int, _Use] = {}
        unowned, events = _Use(), self._packed + array("i", self._events)
        for step, (start, end) in enumerate(pairwise([*self._marks, len(events)])):
            at = start
            while at < end:
                kind, slot, count = events[at], events[at + 1], events[at + 2]
                heads.append(at)
                at += 3 + count
                if kind == _ASSIGNED:
                    heads.append(at - 3)  # its owner is no block
                    open_.setdefault(slot, _Use()).owner = events[at - 1]
                    continue
                use = open_.setdefault(slot, _Use()) if slot >= 0 else unowned
                kinds.append(kind)
                steps.append(step)
                counts.append(count)
                uses.append(use)
                if kind in (BlockEvent.ALLOCATED, BlockEvent.SHARED):
                    use.blocks += count
                elif kind == BlockEvent.FREED and slot >= 0:
                    use.blocks -= count
                    if use.blocks <= 0:  # the next block of this number belongs to another use of the slot
                        del open_[slot]
        index = {owner: number for number, owner in enumerate(owners)} if owners is not None else None
        numbers = [n if index is None else index.get(owner, -1) for n, owner in enumerate(self.owners)]
        sequences = [numbers[use.owner] if use.owner >= 0 else -1 for use in uses]
        is_block = np.ones(len(events), dtype=np.bool_)
        for offset in range(3):
            is_block[np.asarray(heads) + offset] = False
        return BlockEvents(
            step=np.repeat(np.asarray(steps, dtype=np.int32), counts),
            event=np.repeat(np.asarray(kinds, dtype=np.int8), counts),
            block=np.asarray(events)[is_block],
            sequence=np.repeat(np.asarray(sequences, dtype=np.int32), counts),
        )
