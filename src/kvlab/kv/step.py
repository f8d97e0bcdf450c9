"""A pool's step: reserve room for it, then make its tokens part of the sequences, or take it back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import SlotError
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.protocol import Numbers
from kvlab.kv.sharing import PrefixSharing

Rows = NDArray[np.int64]  # slots, or a number for each of them


class StepPreparation:
    """From `reserve` to `advance` or `rollback`; `tables.reserved` says which slots are in between.

    Everything that may be refused is checked before anything changes.
    """

    def __init__(
        self, ledger: BlockLedger, copies: CopyOnWrite, sharing: PrefixSharing | None, max_seq_len: int
    ) -> None:
        self._ledger = ledger
        self._tables = ledger.tables
        self._copies = copies
        self._sharing = sharing
        self._max_seq_len = max_seq_len

    def reserve(self, slots: Numbers, new_tokens: Numbers) -> None:
        """See KVCachePool."""
        rows, new = self._check(slots, new_tokens)
        reserved = rows[self._tables.reserved[rows] > 0]
        if len(reserved):
            raise SlotError(f"slot {reserved[0]} is reserved for this step already")
        self._reserve(rows, new)

    def reserve_missing(self, slots: Numbers, new_tokens: Numbers) -> tuple[Rows, Rows]:
        """Reserve the slots that are not; returns all slots and their new tokens as arrays.

        Raises SlotError where another number of tokens was reserved.
        """
        rows, new = self._check(slots, new_tokens)
        reserved = self._tables.reserved[rows]
        differs = reserved != new
        if differs.any():
            wrong = np.flatnonzero(differs & (reserved > 0))
            if len(wrong):
                row = wrong[0]
                raise SlotError(
                    f"slot {rows[row]}: {reserved[row]} tokens were reserved for this step, not {new[row]}"
                )
            self._reserve(rows[differs], new[differs])
        return rows, new

    def advance(self, rows: Rows, new: Rows) -> None:
        """The step's K and V are stored: its tokens are part of the sequences."""
        tables, size = self._tables, self._tables.block_size
        gone = rows[tables.reserved[rows] != new]
        if len(gone):
            raise SlotError(f"slot {gone[0]} left the step before it was done")
        before = tables.lengths[rows]
        after = before + new
        self._ledger.occupancy.write(tables, rows, after)
        tables.lengths[rows] = after
        tables.stored[rows] = np.maximum(tables.stored[rows], after)
        tables.reserved[rows] = 0
        if self._sharing is not None:
            self._sharing.settle(rows[after // size > before // size].tolist())

    def rollback(self, rows: Rows) -> None:
        """The step failed: slots that are still in it are as they were before it."""
        rows = rows[self._tables.reserved[rows] > 0]
        self._tables.reserved[rows] = 0
        if self._sharing is not None:
            self._rewound(self._sharing.retract(rows.tolist()))

    def leave(self, slot: int) -> None:
        """The slot is about to be freed."""
        if self._sharing is not None:
            self._rewound(self._sharing.close(slot))
        self._copies.forget(slot)

    def _rewound(self, any_slot: bool) -> None:
        if any_slot:  # blocks that several slots hold are not full any more: the first to write one copies it
            self._copies.watch(*self._tables.live)

    def _reserve(self, rows: Rows, new: Rows) -> None:
        tables, size = self._tables, self._tables.block_size
        before = tables.lengths[rows]
        after = before + new
        wanted = np.maximum(-(-after // size) - tables.counts[rows], 0)
        copies = self._copies.find(rows.tolist(), after.tolist()) if self._copies else []
        self._check_demand(rows, wanted, [slot for slot, _ in copies])
        for slot, entry in copies:
            self._copies.copy(slot, entry)
        self._ledger.append_one(rows[wanted == 1])
        for index in np.flatnonzero(wanted > 1).tolist():
            self._ledger.append(int(rows[index]), int(wanted[index]))
        tables.reserved[rows] = new
        if self._sharing is not None:
            fills = after // size > before // size
            self._sharing.publish(rows[fills], after[fills])

    def _check(self, slots: Numbers, new_tokens: Numbers) -> tuple[Rows, Rows]:
        """Slots and numbers of tokens as arrays. Raises SlotError for what no step takes."""
        if len(slots) != len(new_tokens):
            raise SlotError(f"{len(slots)} slots but {len(new_tokens)} token counts")
        tables = self._tables
        if not all(
            isinstance(numbers, np.ndarray) or {int}.issuperset(map(type, numbers))
            for numbers in (slots, new_tokens)
        ):
            self._refuse(slots, new_tokens)
        rows, new = np.asarray(slots, dtype=np.int64), np.asarray(new_tokens, dtype=np.int64)
        if not len(rows):
            return rows, new
        in_range = rows.min() >= 0 and rows.max() < len(tables.counts) and new.min() >= 1
        if not in_range or not tables.is_live[rows].all() or np.bincount(rows).max() > 1:
            self._refuse(slots, new_tokens)
        over = np.flatnonzero(tables.lengths[rows] + new > self._max_seq_len)
        if len(over):
            slot = rows[over[0]]
            raise SlotError(
                f"slot {slot}: {tables.lengths[slot]} + {new[over[0]]} tokens are more than "
                f"max_seq_len={self._max_seq_len}"
            )
        return rows, new

    def _refuse(self, slots: Numbers, new_tokens: Numbers) -> None:
        """Raise SlotError for the first slot or number that is wrong."""
        seen: set[int] = set()
        slots, new_tokens = (
            each.tolist() if isinstance(each, np.ndarray) else each for each in (slots, new_tokens)
        )
        for slot, count in zip(slots, new_tokens, strict=True):
            self._tables.check(slot)
            if slot in seen:
                raise SlotError(f"slot {slot} is given twice in one step")
            if type(count) is not int or count < 1:
                raise SlotError(f"slot {slot}: {count} new tokens; must be a whole number, at least 1")
            seen.add(slot)

    def _check_demand(self, rows: Rows, wanted: Rows, copying: list[int]) -> None:
        """Raise OutOfBlocksError, naming the slots behind the last that fits, unless all of the step fits."""
        demand, free = wanted.copy(), self._ledger.allocator.num_free()
        for slot in copying:
            demand[rows == slot] += 1
        if demand.sum() > free:
            refused = rows[(np.cumsum(demand) > free) & (demand > 0)].tolist()
            self._ledger.check_room(int(demand.sum()), slots=refused)
