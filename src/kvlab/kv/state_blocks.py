"""The blocks of layers with states, as vLLM holds them (`MambaManager`)."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvlab.kv.group_blocks import GroupBlocks, Rows
from kvlab.kv.table import NO_BLOCK


class StateBlocks(GroupBlocks):
    """A state is in the block of the last token that a step computes. Blocks that the step passes are not taken:
    their entries have none. A block counts as full as soon as it is taken.

    Without prefix sharing a slot has one block (one of `states`), which goes along with its tokens. With it the
    block of the step before is the next one's source, and others may find it. Of three `states` one is that of the
    last whole block which a step passes before its last token, for others to find.
    """

    __slots__ = ()

    def num_new(self, behind: int) -> int:
        return max(min(behind, max(self.layers.states - 1, 1)), 0)

    def extend(self, slot: int, behind: int) -> None:
        self.tables.append(slot, [NO_BLOCK] * behind)
        end = int(self.tables.counts[slot])
        self._fill(slot, range(end - self.num_new(behind), end))

    def wanted(self, rows: Rows, after: Rows) -> Rows:
        behind = self._behind(rows, after)
        wanted = (behind > 0) | (self.tables.entries[rows, self._last(after)] == NO_BLOCK)
        counts: Rows = wanted.astype(np.int64)
        for row in np.flatnonzero(behind > 0).tolist():
            slot = int(rows[row])
            if self._moves(slot):
                counts[row] = self._is_forked(slot)
            else:
                counts[row] = self.num_new(int(behind[row]))
        return counts

    def take(self, rows: Rows, after: Rows, wanted: Rows) -> None:
        behind, last = self._behind(rows, after), self._last(after)
        for row in np.flatnonzero((behind > 0) | (wanted > 0)).tolist():
            slot, entry, count = int(rows[row]), int(last[row]), int(behind[row])
            if count <= 0:  # a step that went further has failed
                self._fill(slot, [entry])
            elif self._moves(slot):
                self._move(slot, entry, leave=bool(wanted[row]))
            else:
                self.extend(slot, count)

    def write(self, rows: Rows, after: Rows) -> None:
        """Nothing: its blocks are full."""

    def is_computing(self, hits: Sequence[object]) -> bool:
        return bool(hits) and isinstance(hits[-1], int) and self.sharing.is_pending(hits[-1])

    def to_fork(self, slot: int) -> tuple[list[int], int]:
        blocks = self.tables.blocks(slot)[-1:]
        return blocks, int(self.tables.counts[slot]) - len(blocks)

    def _last(self, after: Rows) -> Rows:
        """The entries of the last of so many tokens."""
        last: Rows = (after - 1) // self.tables.block_size
        return last

    def _behind(self, rows: Rows, after: Rows) -> Rows:
        """Entries that the slots' tables lack."""
        behind: Rows = self._last(after) + 1 - self.tables.counts[rows]
        return behind

    def _moves(self, slot: int) -> bool:
        """Whether the slot's one block goes along."""
        return self.layers.states == 1 and bool(self.tables.counts[slot])

    def _is_forked(self, slot: int) -> bool:
        return self.ledger.allocator.ref_count(self.tables.blocks(slot)[-1]) > 1

    def _move(self, slot: int, entry: int, *, leave: bool) -> None:
        """The slot's state is in this entry from now on; `leave`: in a new block, as a fork has the other."""
        tables, held = self.tables, int(self.tables.counts[slot])
        tables.append(slot, [NO_BLOCK] * (entry + 1 - held))
        if leave:
            self._fill(slot, [entry])
            self.ledger.drop_first(slot, held)
        else:
            tables.entries[slot, entry] = tables.entries[slot, held - 1]
            tables.entries[slot, held - 1] = NO_BLOCK

    def _fill(self, slot: int, entries: Iterable[int]) -> None:
        tables = self.tables
        self.ledger.fill(slot, list(entries))
        for entry in entries:
            self.ledger.occupancy.fill(int(tables.entries[slot, entry]), tables.block_size)
