"""What a pool has for each group of layers: block tables, ledger, copy on write, prefix sharing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.block_sharing import BlockSharing
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.groups import LayerGroup
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.table import BlockTables

Rows = NDArray[np.int64]  # slots, or a number for each of them


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

    def num_new(self, behind: int) -> int:
        """Blocks that a slot takes for `behind` entries more, which one step computes."""
        return behind

    def extend(self, slot: int, behind: int) -> None:
        """Give the slot these."""
        self.ledger.append(slot, behind)

    def wanted(self, rows: Rows, after: Rows) -> Rows:
        """Blocks that each slot takes for a step that brings them to `after` tokens."""
        wanted: Rows = np.maximum(-(-after // self.tables.block_size) - self.tables.counts[rows], 0)
        return wanted

    def take(self, rows: Rows, after: Rows, wanted: Rows) -> None:
        """Give the slots these."""
        self.ledger.append_one(rows[wanted == 1])
        for index in np.flatnonzero(wanted > 1).tolist():
            self.ledger.append(int(rows[index]), int(wanted[index]))

    def write(self, rows: Rows, after: Rows) -> None:
        """A step has brought the slots to `after` tokens."""
        self.ledger.occupancy.write(self.tables, rows, after)

    def is_computing(self, hits: Sequence[object]) -> bool:
        """Whether these hits cannot be used yet, as the step in preparation computes them."""
        return False

    def to_fork(self, slot: int) -> tuple[list[int], int]:
        """The blocks that a fork of the slot has, and their first entry."""
        return self.tables.blocks(slot), int(self.tables.first[slot])

    def has_left(self, rows: Rows, tokens: Rows) -> NDArray[np.bool_]:
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
