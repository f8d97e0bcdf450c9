"""A pool's step: reserve room for it, then make its tokens part of the sequences, or take it back."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvlab.errors import SlotError
from kvlab.kv.group_blocks import GroupBlocks, Rows
from kvlab.kv.protocol import Numbers


class _Proposed(NamedTuple):
    """What a slot's step may turn out not to keep."""

    tokens: int  # the last of its new tokens
    blocks: tuple[int, ...] = ()  # of each group: the last of its table, which were taken for those tokens alone


class StepPreparation:
    """From `reserve` to `advance` or `rollback`; `tables.reserved` says which slots are in between.

    Everything that may be refused is checked before anything changes, but that what has left windows is given back.
    """

    def __init__(self, groups: Sequence[GroupBlocks], max_seq_len: int, *, ahead: bool = False) -> None:
        """`ahead`: a step may still run, and need what it sees, while the next is reserved."""
        self._groups, self._ahead = groups, ahead
        self._tables = groups[0].tables  # whose lengths are those of all
        self._allocator = groups[0].ledger.allocator
        self._windows = [group for group in groups if group.layers.window is not None]
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
        tables = self._tables
        gone = rows[tables.reserved[rows] != new]
        if len(gone):
            raise SlotError(f"slot {gone[0]} left the step before it was done")
        proposed = self._proposals(rows) if self._proposed else None
        kept = new if kept is None else self._check_kept(rows, new, kept, proposed)
        before = tables.lengths[rows]
        after = before + kept
        for group in self._groups:
            own = group.tables
            group.write(rows, after)
            own.lengths[rows] = after
            own.stored[rows] = np.maximum(own.stored[rows], after)
            own.reserved[rows] = 0
            group.sharing.confirm(rows, before, after)
        if self._ahead:
            tables.in_flight[rows] = kept
        if proposed is not None:
            self._forget(rows, after, proposed)

    def rollback(self, rows: Rows) -> None:
        """The step failed: slots that are still in it are as they were before it."""
        rows = rows[self._tables.reserved[rows] > 0]
        for group in self._groups:
            group.tables.reserved[rows] = 0
        if self._proposed:
            self._forget(rows, self._tables.lengths[rows], self._proposals(rows))
        self._retract(rows.tolist())

    def leave(self, slot: int) -> None:
        """The slot is about to be freed."""
        self._proposed.pop(slot, None)
        self._retract([slot])
        for group in self._groups:
            group.sharing.close(slot)
            group.copies.forget(slot)

    def _retract(self, slots: Iterable[int]) -> None:
        """What the step of these slots would have filled has no content. Others that share it go back to what is
        left; with several groups, or a window, to their beginning, as the blocks before that may be gone.
        """
        rewound: set[int] = set()
        lost = set(slots)
        while lost:
            sharers = {slot for group in self._groups for slot in group.sharing.retract(sorted(lost))}
            lost = sharers - rewound if len(self._groups) > 1 else set()
            rewound |= sharers
        if not rewound:
            return
        for group in self._groups:
            if len(self._groups) > 1 or group.layers.window is not None:
                for slot in sorted(rewound):
                    group.restart(slot)
            else:  # blocks that several slots hold are not full any more: the first to write one copies it
                group.copies.watch(*self._tables.live)
        in_step = self._tables.reserved > 0
        self._proposed = {slot: proposed for slot, proposed in self._proposed.items() if in_step[slot]}

    def _reserve(self, rows: Rows, new: Rows, proposed: Rows | None = None) -> None:
        size = self._tables.block_size
        before = self._tables.lengths[rows]
        after = before + new
        plans = []
        for group in self._groups:
            wanted = group.wanted(rows, after)
            copies = group.copies.find(rows.tolist(), after.tolist()) if group.copies else []
            plans.append((group, wanted, copies))
        self._make_room(rows, plans)
        held = [] if proposed is None else [group.tables.counts[rows] for group in self._groups]
        for group, wanted, copies in plans:
            for slot, entry in copies:
                group.copies.copy(slot, entry)
            group.take(rows, after, wanted)
            group.tables.reserved[rows] = new
        if proposed is not None:
            after -= proposed
            spare = [
                group.tables.counts[rows] - np.maximum(-(-after // size), before_it)
                for group, before_it in zip(self._groups, held, strict=True)
            ]
            for row in np.flatnonzero(proposed).tolist():
                blocks = tuple(int(blocks_left[row]) for blocks_left in spare)
                self._proposed[int(rows[row])] = _Proposed(int(proposed[row]), blocks)
        for group in self._groups:
            group.sharing.publish_late(rows)
            group.sharing.publish(rows, before, after)

    def _proposals(self, rows: Rows) -> list[_Proposed]:
        """What may be forgotten of each slot."""
        nothing = _Proposed(0)
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
            for group, blocks in zip(self._groups, spare, strict=True):
                if blocks:
                    held = int(group.tables.counts[slot])
                    group.ledger.shorten(slot, max(held - blocks, -(-length // size)))
        for group in self._groups:
            group.sharing.mark_late(late)

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
        counts = np.asarray(proposed, dtype=np.int64)
        if len(counts) != len(rows):
            raise SlotError(f"{len(rows)} slots but {len(counts)} counts of proposed tokens")
        for row in np.flatnonzero((counts < 0) | (counts > new)).tolist():
            raise SlotError(f"slot {rows[row]}: {counts[row]} of {new[row]} new tokens cannot be proposed")
        return counts

    @staticmethod
    def _check_kept(rows: Rows, new: Rows, kept: Rows, proposed: list[_Proposed] | None) -> Rows:
        """Raise SlotError for a slot that would keep more than there is, or less than what was not proposed."""
        least = new - [proposal.tokens for proposal in proposed] if proposed is not None else new
        for row in np.flatnonzero((kept < least) | (kept > new)).tolist():
            raise SlotError(
                f"slot {rows[row]}: keeps {kept[row]} tokens; from {least[row]} to {new[row]} can be kept"
            )
        return kept

    def _refuse(self, slots: Numbers, new_tokens: Numbers) -> None:
        """Raise SlotError for the first slot or number that is wrong."""
        seen: set[int] = set()
        slots, new_tokens = (
            numbers.tolist() if isinstance(numbers, np.ndarray) else numbers for numbers in (slots, new_tokens)
        )
        for slot, count in zip(slots, new_tokens, strict=True):
            self._tables.check(slot)
            if slot in seen:
                raise SlotError(f"slot {slot} is given twice in one step")
            if type(count) is not int or count < 1:
                raise SlotError(f"slot {slot}: {count} new tokens; must be a whole number, at least 1")
            seen.add(slot)

    def give_back(self) -> bool:
        """Give back what all slots hold that not even their last tokens would see again. Whether there was any."""
        if not self._windows:
            return False
        rows, held = np.flatnonzero(self._tables.is_live), self._allocator.num_references
        self._drop_left(rows, self._settled(rows))
        return self._allocator.num_references < held

    def _settled(self, rows: Rows) -> Rows:
        """Tokens that steps have computed which do not run any more."""
        return self._tables.lengths[rows] - self._tables.in_flight[rows]

    def _drop_left(self, rows: Rows, tokens: Rows, wanted: Rows | None = None) -> None:
        """Slot by slot, give back what none of its tokens sees from number `tokens` on; up to the slot before which
        more blocks are `wanted` than are free.
        """
        left = np.zeros(len(rows), dtype=np.bool_)
        for group in self._windows:
            left |= group.has_left(rows, tokens)
        for row in np.flatnonzero(left).tolist():
            if wanted is not None and row and wanted[row - 1] > self._allocator.num_free():
                return
            for group in self._windows:
                group.drop_left(int(rows[row]), int(tokens[row]))

    def _make_room(self, rows: Rows, plans: Iterable[tuple[GroupBlocks, Rows, list[tuple[int, int]]]]) -> None:
        """Give back what has left the windows of the step's tokens, and raise OutOfBlocksError, naming the slots
        behind the last that fits, unless all of the step fits: the blocks that each group wants, and those that it
        copies. As in vLLM a slot has what those before it give back.
        """
        demand = np.zeros(len(rows), dtype=np.int64)
        for _, wanted, copies in plans:
            demand += wanted
            for slot, _ in copies:
                demand[rows == slot] += 1
        if self._windows:
            self._drop_left(rows, self._settled(rows) + 1, np.cumsum(demand))
        if demand.sum() > (free := self._allocator.num_free()):
            refused = rows[(np.cumsum(demand) > free) & (demand > 0)].tolist()
            self._groups[0].ledger.check_room(int(demand.sum()), slots=refused)
