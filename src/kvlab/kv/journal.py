"""What happened to each block, in order: the numbers behind a map of the pool."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class BlockEvent(IntEnum):
    """What happened to a block."""

    ALLOCATED = 0  # handed out, with one reference; what it held is gone
    SHARED = 1  # one more reference
    FREED = 2  # one reference less
    CACHED = 3  # nobody references it, and its content is kept
    DROPPED = 4  # nobody references it, and its content is given up
    SEATED = 5  # in the journal alone: whose slot it is


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """A journal as columns, an entry for each event of a block, in order. `sequence` is the position of the slot's
    sequence in the journal's `tenants`, -1 where there is none.
    """

    step: NDArray[np.int32]
    event: NDArray[np.int8]
    block: NDArray[np.int32]
    sequence: NDArray[np.int32]


@dataclass(slots=True)
class _Stay:
    """A slot from its first block to its last."""

    tenant: int = -1
    blocks: int = 0


class BlockJournal:
    """A record of events that the allocator keeps where it is given one; the engine adds who got a slot.

    While a run goes on this is one list of integers, (kind, slot, number of blocks, the blocks ...) for each event:
    some 100 ns for a call. `columns` makes sense of it afterwards.
    """

    def __init__(self) -> None:
        self.tenants: list[object] = []
        self._events: list[int] = []
        self._marks: list[int] = [0]  # where each step's events end

    def add(self, event: BlockEvent, blocks: Sequence[int], owner: Hashable = None) -> None:
        """These blocks had this event; `owner` is the slot whose references they are."""
        self._events += (event, owner if type(owner) is int else -1, len(blocks))
        self._events += blocks

    def seat(self, slot: int, tenant: object) -> None:
        """The slot that was opened last under this number is this sequence's."""
        self._events += (BlockEvent.SEATED, slot, 1, len(self.tenants))
        self.tenants.append(tenant)

    def end_step(self) -> None:
        """What is not yet in a step was this step's."""
        self._marks.append(len(self._events))

    def columns(self) -> BlockEvents:
        """The events so far. What came behind the last `end_step` counts to one more step."""
        kinds: list[int] = []
        steps: list[int] = []
        counts: list[int] = []
        owners: list[_Stay] = []
        blocks: list[int] = []
        stays: dict[int, _Stay] = {}
        nobody, events = _Stay(), self._events
        for step, (start, end) in enumerate(pairwise([*self._marks, len(events)])):
            at = start
            while at < end:
                kind, slot, count = events[at : at + 3]
                which = events[at + 3 : at + 3 + count]
                at += 3 + count
                if kind == BlockEvent.SEATED:
                    stays.setdefault(slot, _Stay()).tenant = which[0]
                    continue
                stay = stays.setdefault(slot, _Stay()) if slot >= 0 else nobody
                kinds.append(kind)
                steps.append(step)
                counts.append(count)
                owners.append(stay)
                blocks += which
                if kind in (BlockEvent.ALLOCATED, BlockEvent.SHARED):
                    stay.blocks += count
                elif kind == BlockEvent.FREED and slot >= 0:
                    stay.blocks -= count
                    if stay.blocks <= 0:  # the next block of this number is another stay's
                        del stays[slot]
        tenants = [stay.tenant for stay in owners]
        return BlockEvents(
            step=np.repeat(np.asarray(steps, dtype=np.int32), counts),
            event=np.repeat(np.asarray(kinds, dtype=np.int8), counts),
            block=np.asarray(blocks, dtype=np.int32),
            sequence=np.repeat(np.asarray(tenants, dtype=np.int32), counts),
        )
