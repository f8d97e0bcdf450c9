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

    def has_left(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these slots hold blocks that none of their tokens sees from number `tokens` on."""
        window, tables = self.layers.window, self.tables
        if window is None:
            return np.zeros(len(rows), dtype=np.bool_)
        return np.maximum(tokens - window, 0) // tables.block_size > tables.first[rows]

    def drop_left(self, slot: int, tokens: int) -> None:
        """Give those of a slot back."""
        first = self.sharing.droppable_entries(slot, self.layers.first_block(tokens, self.tables.block_size))
        if first > self.tables.first[slot]:
            self.ledger.drop_first(slot, first)

    def restart(self, slot: int) -> None:
        """The slot has no tokens and no blocks."""
        tables = self.tables
        self.sharing.restart(slot)
        self.ledger.shorten(slot, 0)
        for column in (tables.lengths, tables.stored, tables.reserved, tables.in_flight):
            column[slot] = 0
