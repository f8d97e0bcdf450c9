"""The ledger's part of steps that are all alike: the calls that they make, without those that change nothing."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvlab.kv.group_blocks import GroupBlocks, Rows


class BlockRun:
    """Steps in each of which the slots `decoding` take a token, and after them `chunk` some tokens of its prompt.

    A step changes the ledger where a slot begins a block or fills one; which step that is follows from the lengths.
    Call `step` for each, then `finish`. The slots' lists of tokens have all tokens of the run already. Pools that
    give back what leaves a window take no such steps at once.
    """

    def __init__(self, groups: Sequence[GroupBlocks], decoding: Rows, chunk: tuple[int, int] | None) -> None:
        group, tables = groups[0], groups[0].tables
        self._size = tables.block_size
        self._ledger, self._sharing = group.ledger, group.sharing
        self._decoding, self._chunk = decoding, chunk
        self._before = tables.lengths[decoding]
        self._at = int(tables.lengths[chunk[0]]) if chunk is not None else 0  # tokens of the chunk's slot
        rows = np.append(decoding, chunk[0]) if chunk is not None else decoding
        self._is_plain = not (
            len(groups) > 1
            or group.layers.window is not None
            or group.copies
            or (tables.stored[rows] != tables.lengths[rows]).any()
            or (tables.counts[decoding] != -(-self._before // self._size)).any()
        )
        self._steps = 0
        phases = self._before % self._size
        self._beginning = self._by_step(-phases % self._size)
        self._filling = self._by_step(self._size - 1 - phases)

    def most(self, steps: int) -> int:
        """How many of these steps surely have memory, and write no block that others hold."""
        if not self._is_plain:
            return 0
        free = self._ledger.allocator.num_free()
        while steps and self._blocks(steps) > free:
            steps //= 2
        return steps

    def step(self) -> bool:
        """The next step. False if blocks are as they were, but for their tokens."""
        ledger, sharing, size, turn = self._ledger, self._sharing, self._size, self._steps % self._size
        beginning, filling = self._beginning.get(turn), self._filling.get(turn)
        if beginning is not None:
            ledger.append_one(self._decoding[beginning])
        filled = list[tuple[Rows, Rows, Rows]]()  # slots, and their tokens before and behind the step
        if filling is not None:
            rows, before = self._decoding[filling], self._before[filling] + self._steps
            ledger.occupancy.hold(ledger.tables.entries[rows, before // size], size)
            filled.append((rows, before, before + 1))
            sharing.publish(*filled[0])
        self._steps += 1
        ledger.occupancy.tokens += len(self._decoding)
        # Behind what those that decode publish, which quotas count.
        begins = self._chunk is not None and self._begin(*self._chunk)
        if self._chunk is not None and (chunk := self._compute(*self._chunk)) is not None:
            filled.append(chunk)
            sharing.publish(*chunk)
        for part in filled:
            sharing.confirm(*part)
        return begins or bool(filled) or beginning is not None

    def finish(self) -> None:
        """The tables say what the steps have done."""
        tables, occupancy, size = self._ledger.tables, self._ledger.occupancy, self._size
        rows, lengths = self._decoding, self._before + self._steps
        tables.lengths[rows] = tables.stored[rows] = lengths
        occupancy.hold(tables.entries[rows, (lengths - 1) // size], (lengths - 1) % size + 1)
        if self._chunk is not None:
            slot = self._chunk[0]
            tables.lengths[slot] = tables.stored[slot] = self._at

    def _begin(self, slot: int, count: int) -> bool:
        """Blocks for the next chunk. Whether it needs any."""
        missing = -(-(self._at + count) // self._size) - int(self._ledger.tables.counts[slot])
        if missing > 0:
            self._ledger.append(slot, missing)
        return missing > 0

    def _compute(self, slot: int, count: int) -> tuple[Rows, Rows, Rows] | None:
        """The next chunk. What it fills, as in `step`, if that is any block."""
        tables, size, before, after = self._ledger.tables, self._size, self._at, self._at + count
        self._at = after
        self._ledger.occupancy.hold(tables.entries[slot, before // size : after // size], size)
        if after % size:
            self._ledger.occupancy.hold(tables.entries[slot, after // size], after % size)
        self._ledger.occupancy.tokens += count
        if after // size == before // size:
            return None
        return np.array([slot]), np.array([before]), np.array([after])

    def _by_step(self, turns: Rows) -> dict[int, Rows]:
        """The rows of each turn, in order."""
        order = np.argsort(turns, kind="stable")
        ends = np.bincount(turns, minlength=self._size).cumsum().tolist()
        return {turn: order[start:end] for turn, (start, end) in enumerate(pairwise([0, *ends])) if start < end}

    def _blocks(self, steps: int) -> int:
        """Blocks that so many steps begin."""
        after = -(-(self._before + steps) // self._size)
        begun = int((after - -(-self._before // self._size)).sum())
        if self._chunk is None:
            return begun
        slot, count = self._chunk
        return begun + max(-(-(self._at + steps * count) // self._size) - int(self._ledger.tables.counts[slot]), 0)
