"""Who holds which block, and how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import OutOfBlocksError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.occupancy import Occupancy
from kvlab.kv.table import BlockTables

if TYPE_CHECKING:
    from kvlab.kv.storage import KVStorage


class BlockLedger:
    """Allocator, block tables and occupancy, which change together. Slots own their blocks' references.

    Where there are tensors, `copy` copies K and V too. Ledgers of one pool have its allocator and its occupancy in
    common.
    """

    def __init__(
        self, allocator: BlockAllocator, tables: BlockTables, occupancy: Occupancy, storage: KVStorage | None
    ) -> None:
        self.allocator = allocator
        self.tables = tables
        self.storage = storage
        self.occupancy = occupancy

    def check_room(self, demand: int, keep_free: int = 0, slots: Sequence[int] = ()) -> None:
        """Raise OutOfBlocksError, naming `slots`, unless `keep_free` blocks are left once `demand` are taken."""
        allocator = self.allocator
        if demand > allocator.num_free() - keep_free:
            free = max(allocator.num_free() - keep_free, 0)
            evictable = allocator.num_evictable()
            raise OutOfBlocksError(demand, free, allocator.num_blocks, evictable=evictable, slots=slots)

    def open(self, shared: Sequence[int | None], first: int = 0) -> int:
        """A slot whose table has these `shared` blocks from entry `first` on; None: an entry that `fill` gives a
        block at once. There is room: see `check_room`.
        """
        blocks = [block for block in shared if block is not None]
        slot = self.tables.add([block or 0 for block in shared] if len(blocks) < len(shared) else blocks, first)
        self.occupancy.reuse(self.allocator.share(blocks, slot))
        return slot

    def fill(self, slot: int, entries: Sequence[int]) -> None:
        """Blocks for entries of a slot that have none yet."""
        blocks = np.array(self.allocator.allocate(len(entries), slot), dtype=np.int32)
        self.occupancy.clear(blocks)
        self.tables.entries[slot, list(entries)] = blocks

    def append(self, slot: int, count: int) -> None:
        """Blocks for the tokens behind a slot's last entry."""
        blocks = np.array(self.allocator.allocate(count, slot), dtype=np.int32)
        self.occupancy.clear(blocks)
        self.tables.append(slot, blocks)

    def append_one(self, rows: NDArray[np.int64]) -> None:
        """A block for each of these slots, as decoding takes them."""
        if len(rows):
            blocks = self.allocator.allocate_each(rows.tolist())
            self.occupancy.clear(blocks)
            self.tables.append_one(rows, blocks)

    def remap(self, slot: int, entry: int, block: int) -> None:
        """Map an entry to a block of the same content, and give back the slot's own."""
        self.occupancy.reuse(self.allocator.share([block], slot))
        self._replace(slot, entry, block)

    def copy(self, slot: int, entry: int) -> None:
        """Map an entry to a new block with the same tokens, which the slot may write."""
        shared = int(self.tables.entries[slot, entry])
        (own,) = self.allocator.allocate(1, slot)
        if self.storage is not None:
            self.storage.copy_blocks([shared], [own])
        held = self.occupancy.held(shared)
        self._replace(slot, entry, own)
        self.occupancy.clear([own])
        self.occupancy.fill(own, held)

    def copy_part(self, slot: int, entry: int, source: int, tokens: int) -> bool:
        """A slot's own block, the first that it has to compute, has the first `tokens` of another's; False if they
        are the same block, so that nothing is copied. The other may have been given up since its last write.
        """
        own, tables = int(self.tables.entries[slot, entry]), self.tables
        if own != source and self.storage is not None:
            self.storage.copy_blocks([source], [own])
        self.occupancy.fill(own, tokens)
        tables.stored[slot] = tables.lengths[slot] = entry * tables.block_size + tokens
        return own != source

    def shorten(self, slot: int, count: int) -> None:
        """Give back a slot's blocks behind the first `count`, which hold none of its tokens."""
        tables, first = self.tables, int(self.tables.first[slot])
        blocks = tables.blocks_from(slot, max(count, first))
        tables.counts[slot], tables.first[slot] = count, min(first, count)
        if blocks:
            self._release(blocks[::-1], slot)

    def drop_first(self, slot: int, first: int) -> None:
        """Give back the blocks before entry `first`, which the slot does not need any more, last to first."""
        if blocks := self.tables.drop_first(slot, first)[::-1]:
            self._release(blocks, slot)

    def close(self, slot: int) -> None:
        """Free a slot's blocks, last to first, so that a prefix outlives its tail."""
        self._release(self.tables.blocks(slot)[::-1], slot)
        self.tables.remove(slot)

    def _replace(self, slot: int, entry: int, block: int) -> None:
        old = int(self.tables.entries[slot, entry])
        self.tables.entries[slot, entry] = block
        self._release([old], slot)

    def _release(self, blocks: Sequence[int], owner: object) -> int:
        released = self.allocator.free(blocks, owner)
        self.occupancy.release(released)
        return len(released)


def reclaim(ledgers: Sequence[BlockLedger]) -> int:
    """Free every block that no live slot names in one of the tables of a pool; returns how many."""
    ledger = ledgers[0]
    allocator, live, freed = ledger.allocator, ledger.tables.live, 0
    for owner, blocks in allocator.owners.leaked_blocks(live).items():
        released = allocator.free(blocks, owner)
        ledger.occupancy.release(released)
        freed += len(released)
    named = {block for one in ledgers for slot in live for block in one.tables.blocks(slot)}
    lost = allocator.find_unreferenced_blocks(named)
    freed += allocator.force_free(lost)
    ledger.occupancy.release(lost)
    return freed
