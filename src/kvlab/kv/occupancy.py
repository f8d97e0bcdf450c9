"""How many tokens the blocks in use hold, each block counted once however many sequences share it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.table import BlockTables

Blocks = Sequence[int] | NDArray[np.int32]


class Occupancy:
    """Tokens stored in each block, and their sum over the blocks in use. A step costs O(blocks it writes)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = 0  # stored tokens of all blocks in use
        self._size = block_size
        self._held: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)

    def clear(self, blocks: Blocks) -> None:
        """These blocks were handed out anew: what they held is gone."""
        self._held[blocks] = 0

    def reuse(self, blocks: Sequence[int]) -> None:
        """These blocks are in use again, with what they hold."""
        if blocks:
            self.tokens += int(self._held[blocks].sum())

    def release(self, blocks: Sequence[int]) -> None:
        """These blocks are not in use any more."""
        if blocks:
            self.tokens -= int(self._held[blocks].sum())

    def held(self, block: int) -> int:
        """Tokens stored in a block."""
        return int(self._held[block])

    def fill(self, block: int, tokens: int) -> None:
        """A block in use holds this many tokens, if it did not hold more."""
        gained = max(tokens - int(self._held[block]), 0)
        self._held[block] += gained
        self.tokens += gained

    def hold(self, blocks: NDArray[np.int32], tokens: NDArray[np.int64] | int) -> None:
        """Blocks in use hold so many tokens. The caller adds what they gained to `tokens`."""
        self._held[blocks] = tokens

    def write(self, tables: BlockTables, rows: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """A step brought these slots to `after` stored tokens; call before the tables say so."""
        before = tables.stored[rows]
        grown = after - before
        one = grown == 1
        if one.all():
            self._write_one(tables, rows, after)
            return
        self._write_one(tables, rows[one], after[one])
        for index in np.flatnonzero(grown > 1).tolist():
            entries = np.arange(before[index] // self._size, -(-after[index] // self._size))
            blocks = tables.entries[rows[index], entries]
            filled = np.minimum(after[index] - entries * self._size, self._size).astype(np.int32)
            self.tokens += int((filled - self._held[blocks]).sum())
            self._held[blocks] = filled

    def _write_one(self, tables: BlockTables, rows: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """These slots took one token each, as decoding does."""
        entries = (after - 1) // self._size
        blocks = tables.entries[rows, entries]
        filled = after - entries * self._size
        self.tokens += int((filled - self._held[blocks]).sum())
        self._held[blocks] = filled
