"""A pool's step: reserve room for it, then make its tokens part of the sequences, or take it back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import SlotError
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.protocol import Numbers
from kvlab.kv.sharing import PrefixSharing

Rows = NDArray[np.int64]  # slots, or a number for each of them


class _Proposed(NamedTuple):
    """What a slot's step may turn out not to keep."""

    tokens: int  # the last of its new tokens
    blocks: int  # the last of its table, which were taken for those tokens alone


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
        self._proposed: dict[int, _Proposed] = {}  # of slots that are in the step

    def reserve(self, slots: Numbers, new_tokens: Numbers, proposed: Numbers | None = None) -> None:
        """See KVCachePool."""
        rows, new = self._check(slots, new_tokens)
        reserved = rows[self._tables.reserved[rows] > 0]
        if len(reserved):
            raise SlotError(f"slot {reserved[0]} is reserved for this step already")
        self._reserve(rows, new, None if proposed is None else self._check_proposed(rows, new, proposed))

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

    def advance(self, rows: Rows, new: Rows, kept: Rows | None = None) -> None:
        """The step's K and V are stored: its tokens, or the first `kept` of each, are part of the sequences."""
        tables, size = self._tables, self._tables.block_size
        gone = rows[tables.reserved[rows] != new]
        if len(gone):
            raise SlotError(f"slot {gone[0]} left the step before it was done")
        proposed = self._proposals(rows) if self._proposed else None
        kept = new if kept is None else self._check_kept(rows, new, kept, proposed)
        before = tables.lengths[rows]
        after = before + kept
        self._ledger.occupancy.write(tables, rows, after)
        tables.lengths[rows] = after
        tables.stored[rows] = np.maximum(tables.stored[rows], after)
        tables.reserved[rows] = 0
        if self._sharing is not None:
            self._sharing.settle(rows[after // size > before // size].tolist())
        if proposed is not None:
            self._forget(rows, after, proposed)

    def rollback(self, rows: Rows) -> None:
        """The step failed: slots that are still in it are as they were before it."""
        tables = self._tables
        rows = rows[tables.reserved[rows] > 0]
        tables.reserved[rows] = 0
        if self._proposed:
            self._forget(rows, tables.lengths[rows], self._proposals(rows))
        if self._sharing is not None:
            self._rewound(self._sharing.retract(rows.tolist()))

    def leave(self, slot: int) -> None:
        """The slot is about to be freed."""
        self._proposed.pop(slot, None)
        if self._sharing is not None:
            self._rewound(self._sharing.close(slot))
        self._copies.forget(slot)

    def _rewound(self, any_slot: bool) -> None:
        if any_slot:  # blocks that several slots hold are not full any more: the first to write one copies it
            self._copies.watch(*self._tables.live)
            in_step = self._tables.reserved > 0
            self._proposed = {slot: each for slot, each in self._proposed.items() if in_step[slot]}

    def _reserve(self, rows: Rows, new: Rows, proposed: Rows | None = None) -> None:
        tables, size = self._tables, self._tables.block_size
        before = tables.lengths[rows]
        after = before + new
        counts = tables.counts[rows]
        wanted = np.maximum(-(-after // size) - counts, 0)
        copies = self._copies.find(rows.tolist(), after.tolist()) if self._copies else []
        self._check_demand(rows, wanted, [slot for slot, _ in copies])
        for slot, entry in copies:
            self._copies.copy(slot, entry)
        self._ledger.append_one(rows[wanted == 1])
        for index in np.flatnonzero(wanted > 1).tolist():
            self._ledger.append(int(rows[index]), int(wanted[index]))
        tables.reserved[rows] = new
        if proposed is not None:
            after -= proposed
            spare = counts + wanted - np.maximum(-(-after // size), counts)
            for row in np.flatnonzero(proposed).tolist():
                self._proposed[int(rows[row])] = _Proposed(int(proposed[row]), int(spare[row]))
        if self._sharing is not None:
            self._sharing.catch_up(rows)
            fills = after // size > before // size
            self._sharing.publish(rows[fills], after[fills])

    def _proposals(self, rows: Rows) -> list[_Proposed]:
        """What may be forgotten of each slot."""
        nothing = _Proposed(0, 0)
        return [self._proposed.get(slot, nothing) for slot in rows.tolist()]

    def _forget(self, rows: Rows, lengths: Rows, proposed: list[_Proposed]) -> None:
        """The step of these slots is over, and they have these lengths: give back the blocks of tokens that were
        not kept. What kept ones have filled is shared once the slots' lists have them.
        """
        size, late = self._tables.block_size, []
        for slot, length, (tokens, spare) in zip(rows.tolist(), lengths.tolist(), proposed, strict=True):
            if not tokens:
                continue
            del self._proposed[slot]
            late.append(slot)
            if spare:
                held = int(self._tables.counts[slot])
                self._ledger.shorten(slot, max(held - spare, -(-length // size)))
        if self._sharing is not None:
            self._sharing.fall_behind(late)

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

    @staticmethod
    def _check_proposed(rows: Rows, new: Rows, proposed: Numbers) -> Rows:
        """Raise SlotError unless fewer tokens are proposed than are new."""
        found = np.asarray(proposed, dtype=np.int64)
        if len(found) != len(rows):
            raise SlotError(f"{len(rows)} slots but {len(found)} counts of proposed tokens")
        for row in np.flatnonzero((found < 0) | (found > new)).tolist():
            raise SlotError(f"slot {rows[row]}: {found[row]} of {new[row]} new tokens cannot be proposed")
        return found

    @staticmethod
    def _check_kept(rows: Rows, new: Rows, kept: Rows, proposed: list[_Proposed] | None) -> Rows:
        """Raise SlotError for a slot that would keep more than there is, or less than what was not proposed."""
        least = new - [each.tokens for each in proposed] if proposed is not None else new
        for row in np.flatnonzero((kept < least) | (kept > new)).tolist():
            raise SlotError(
                f"slot {rows[row]}: keeps {kept[row]} tokens; from {least[row]} to {new[row]} can be kept"
            )
        return kept

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
