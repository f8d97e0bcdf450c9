"""Block tables: for each slot, which blocks hold its tokens, in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import SlotError

NO_BLOCK = -1  # an entry of layers with states, of which no block is needed
_NUMBERS = ("first", "counts", "lengths", "stored", "reserved", "in_flight")
_COLUMNS = ("entries", "is_live", *_NUMBERS)


class BlockTables:
    """The tables of all slots in one array that is updated in place, so that a step reads it without building
    anything per token.

        entries [slots, width] int32    block ids in logical order; beyond `counts` meaningless
        first   [slots] int64           entries before it were given back, and name no block
        counts  [slots] int64           entries in use, those before `first` included
        lengths [slots] int64           tokens computed: the next one has this position
        stored  [slots] int64           tokens whose K and V are in the blocks; at least `lengths`
        reserved [slots] int64          new tokens of the step in preparation; 0: the slot is in none
        in_flight [slots] int64         computed tokens of a step that may run while the next is prepared
        is_live [slots] bool            which slots are in use

    Token `p` of a slot is in entry `p // block_size`, at offset `p % block_size`. `stored` is more than `lengths`
    only for a prompt that is cached to its last token, which is run once more for its logits, storing nothing.
    Tables of states have entries without a block (`NO_BLOCK`): a state is kept where a step ends.
    """

    def __init__(self, width: int, block_size: int) -> None:
        self.width = width
        self.block_size = block_size
        self.entries: NDArray[np.int32] = np.zeros((8, width), dtype=np.int32)
        self.first: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.counts: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.lengths: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.stored: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.reserved: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.in_flight: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.is_live: NDArray[np.bool_] = np.zeros(8, dtype=np.bool_)
        self._unused = list(range(7, -1, -1))

    def __len__(self) -> int:
        return len(self.counts) - len(self._unused)

    @property
    def live(self) -> set[int]:
        """The slots in use."""
        return set(np.flatnonzero(self.is_live).tolist())

    def take(self, slots: NDArray[np.int64], width: int) -> BlockTables:
        """Copies of some slots' tables, with as many entries, to be read."""
        taken = BlockTables(width, self.block_size)
        taken.entries = self.entries[slots, :width]
        for name in ("first", "counts", "lengths", "stored"):
            setattr(taken, name, getattr(self, name)[slots])
        return taken

    def add(self, blocks: Sequence[int], first: int = 0) -> int:
        """Open a slot whose table has `blocks` from entry `first` on; returns its number."""
        if not self._unused:
            old = len(self.counts)  # all columns become twice as long
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self._unused = list(range(2 * old - 1, old - 1, -1))
        slot = self._unused.pop()
        self.is_live[slot] = True
        self.first[slot] = self.counts[slot] = first
        self.entries[slot, :first] = 0
        self.append(slot, blocks)
        return slot

    def append(self, slot: int, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        """Map the token range after the last entry to `blocks`; earlier entries stay as they are."""
        count = int(self.counts[slot])
        self.entries[slot, count : count + len(blocks)] = blocks
        self.counts[slot] = count + len(blocks)

    def append_one(self, rows: NDArray[np.int64], blocks: Sequence[int]) -> None:
        """The same for several slots, each of which gets one block."""
        self.entries[rows, self.counts[rows]] = blocks
        self.counts[rows] += 1

    def remove(self, slot: int) -> list[int]:
        """Close a slot; returns the blocks it held, in logical order."""
        blocks = self.blocks(slot)
        self.is_live[slot] = False
        for name in _NUMBERS:
            getattr(self, name)[slot] = 0
        self._unused.append(slot)
        return blocks

    def blocks(self, slot: int) -> list[int]:
        """A slot's block ids in logical order. Raises SlotError for a slot that is not live."""
        self.check(slot)
        return self.blocks_from(slot, int(self.first[slot]))

    def blocks_from(self, slot: int, first: int) -> list[int]:
        """Those from entry `first` on."""
        return _named(self.entries[slot, first : self.counts[slot]].tolist())

    def drop_first(self, slot: int, first: int) -> list[int]:
        """The slot does not need the entries before `first` any more; returns their blocks, in logical order. The
        entries are 0 from now on, a block that nobody reads through them.
        """
        blocks = _named(self.entries[slot, self.first[slot] : first].tolist())
        self.entries[slot, :first] = 0
        self.first[slot] = first
        return blocks

    def locate(self, slot: int, position: int) -> tuple[int, int]:
        """The block and the offset in it that hold a token's K and V.

        Raises SlotError for a position outside the blocks of the slot.
        """
        self.check(slot)
        room = int(self.counts[slot]) * self.block_size
        if not self.first[slot] * self.block_size <= position < room:
            raise SlotError(f"slot {slot}: position {position} is outside its {room} token slots")
        return int(self.entries[slot, position // self.block_size]), position % self.block_size

    def check(self, slot: int) -> None:
        """Raise SlotError unless the slot is live."""
        sound = isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot < len(self.is_live)
        if not sound or not self.is_live[slot]:
            raise SlotError(f"slot {slot!r} is not live; live slots: {sorted(self.live)}")


def _named(entries: list[int]) -> list[int]:
    """The blocks of entries, without those that have none."""
    return [block for block in entries if block != NO_BLOCK] if NO_BLOCK in entries else entries
