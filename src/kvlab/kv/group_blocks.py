"""What a pool has for each group of layers: block tables, ledger, copy on write, prefix sharing."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.block_sharing import BlockSharing
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.groups import LayerGroup
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.table import BlockTables


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of a group of layers. The groups of a pool have the same slots, of the same lengths."""

    layers: LayerGroup
    ledger: BlockLedger
    copies: CopyOnWrite
    sharing: BlockSharing

    @property
    def tables(self) -> BlockTables:
        """The group's block tables."""
        return self.ledger.tables

    def drop_before_window(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """These slots have so many tokens: give back the blocks that no query to come can see."""
        window, tables = self.layers.window, self.tables
        if window is None:
            return
        needed = np.maximum(lengths - window, 0) // tables.block_size
        for row in np.flatnonzero(needed > tables.first[rows]).tolist():
            slot = int(rows[row])
            first = self.sharing.droppable_entries(slot, int(needed[row]))
            if first > tables.first[slot]:
                self.ledger.drop_first(slot, first)

    def restart(self, slot: int) -> None:
        """The slot has no tokens and no blocks."""
        tables = self.tables
        self.sharing.restart(slot)
        self.ledger.shorten(slot, 0)
        for column in (tables.lengths, tables.stored, tables.cached, tables.reserved):
            column[slot] = 0
