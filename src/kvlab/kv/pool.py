"""What both pools share: blocks, tables, steps, forks and recovery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.core import PoolCounters, PoolStats
from kvlab.errors import CapacityError, OutOfBlocksError, SlotError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.audit import Finding, audit
from kvlab.kv.eviction import EvictionPolicy
from kvlab.kv.journal import BlockJournal
from kvlab.kv.occupancy import Occupancy
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.protocol import Salt
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.storage import KVStorage
from kvlab.kv.table import BlockTables
from kvlab.kv.view import CacheView


class BlockPool(ABC):
    """What both pools are: an allocator, block tables, and tensors that may be absent.

    A contiguous slot is a block of `max_seq_len` tokens, so the two differ in the size of a block, in what
    admission may count on, and in what a fork shares. Slots own their blocks' references.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seq_len: int,
        storage: KVStorage | None = None,
        *,
        prefix_sharing: bool = False,
        eviction: EvictionPolicy | None = None,
        journal: BlockJournal | None = None,
    ) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"a pool of {num_blocks} blocks holds no sequence; one of {max_seq_len} tokens needs "
                f"{-(-max_seq_len // block_size)} blocks of {block_size} tokens"
            )
        self.max_seq_len = max_seq_len
        self.storage = storage
        self.tables = BlockTables(-(-max_seq_len // block_size), block_size)
        self.index = PrefixIndex(block_size) if prefix_sharing else None
        self.allocator = BlockAllocator(
            num_blocks,
            eviction,
            on_evict=self.index.unpublish if self.index is not None else lambda block: None,
            journal=journal,
        )
        self._sharing = PrefixSharing(self.index, self.allocator, self.tables) if self.index is not None else None
        self._occupancy = Occupancy(num_blocks, block_size)
        self._reserved: dict[int, int] = {}  # slots of the step in preparation, and their new tokens
        self._forked: set[int] = set()  # slots whose blocks may be shared before they are full
        self._cached: dict[int, int] = {}
        self._cow_copies = self._merged = 0
        self._prompt_tokens = self._hit_tokens = self._same_step_tokens = self._recompute_tokens = 0

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.tables.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        return min(self.max_seq_len, self.allocator.num_blocks * self.block_size)

    def allocate_slot(
        self,
        initial_tokens: int = 0,
        token_ids: Sequence[int] | None = None,
        *,
        salt: Salt = None,
        keep_free: int = 0,
        resumed: bool = False,
    ) -> int:
        """See KVCachePool."""
        tokens = initial_tokens if token_ids is None else len(token_ids)
        if tokens < 0 or keep_free < 0:
            raise SlotError(f"initial_tokens={tokens}, keep_free={keep_free}: must be at least 0")
        if tokens > self.max_seq_len:
            raise SlotError(f"{tokens} tokens are more than max_seq_len={self.max_seq_len}")
        if salt is not None and not isinstance(salt, str | int):
            raise SlotError(f"salt={salt!r}: must be text or a whole number")
        hits = self.index.match(token_ids, salt) if self.index is not None and token_ids else []
        fresh = self._initial_blocks(tokens) - len(hits)
        # A hit that nobody references takes a block out of the free queue too.
        demand = fresh + sum(self.allocator.ref_count(block) == 0 for block in hits)
        free = self.allocator.num_free()
        if demand > free - keep_free:
            raise OutOfBlocksError(
                demand,
                max(free - keep_free, 0),
                self.allocator.num_blocks,
                evictable=self.allocator.num_evictable(),
            )
        slot = self.tables.add(hits)
        self._occupancy.revive(self.allocator.share(hits, slot))
        self._append_blocks(slot, fresh)
        self._count_hits(slot, tokens, hits, resumed=resumed)
        if self._sharing is not None:
            self._sharing.open(slot, token_ids or (), salt, len(hits), known=token_ids is not None or not tokens)
        return slot

    def fork_slot(self, slot: int, *, rerun_last: bool = False) -> int:
        """See KVCachePool."""
        self._check_idle(slot)
        rewind = min(int(rerun_last), int(self.tables.lengths[slot]))
        blocks = self._fork_blocks(slot)
        copy = self.tables.add(blocks)
        self.tables.lengths[copy] = self.tables.lengths[slot] - rewind
        self.tables.stored[copy] = self.tables.stored[slot]
        self._cached[copy] = self._cached[slot]
        self._own_fork(slot, copy, blocks)
        if self._sharing is not None:
            self._sharing.fork(slot, copy)
        return copy

    def extend_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """See KVCachePool."""
        if len(slots) != len(tokens):
            raise SlotError(f"{len(slots)} slots but {len(tokens)} tokens")
        if not self.tables.live.issuperset(slots):
            for slot in slots:
                self.tables.check(slot)
        if self._sharing is not None:
            self._sharing.extend(slots, tokens)

    def reserve(self, slots: Sequence[int], new_tokens: Sequence[int]) -> None:
        """See KVCachePool."""
        rows, new = self._check_step(slots, new_tokens)
        if not self._reserved.keys().isdisjoint(slots):
            slot = next(slot for slot in slots if slot in self._reserved)
            raise SlotError(f"slot {slot} is reserved for this step already")
        wanted = -(-(self.tables.lengths[rows] + new) // self.block_size) - self.tables.counts[rows]
        copies = self._copies_before_write(slots, new_tokens)
        self._check_demand(rows, wanted, copies)
        for slot, entry in copies:
            self._copy_on_write(slot, entry)
        self._append_one(rows[wanted == 1])
        for index in np.flatnonzero(wanted > 1).tolist():
            self._append_blocks(int(rows[index]), int(wanted[index]))
        self._reserved.update(zip(slots, new_tokens, strict=True))
        if self._sharing is not None:
            after = self.tables.lengths[rows] + new
            crossing = np.flatnonzero(after // self.block_size > self.tables.lengths[rows] // self.block_size)
            for index in crossing.tolist():
                self._sharing.announce(int(rows[index]), int(after[index]))

    def view(self, slots: Sequence[int], new_tokens: Sequence[int]) -> CacheView:
        """See KVCachePool. Raises SlotError where another number of tokens was reserved."""
        if [self._reserved.get(slot) for slot in slots] == list(new_tokens) and len(set(slots)) == len(slots):
            rows, new = np.asarray(slots, dtype=np.int64), np.asarray(new_tokens, dtype=np.int64)
        else:
            rows, new = self._reserve_missing(slots, new_tokens)
        return CacheView(
            self.tables,
            self.storage,
            rows,
            new,
            is_paged=self.is_paged(),
            on_advance=self._advance,
            on_rollback=self._rollback,
        )

    def prefill_view(self, slot: int) -> CacheView:
        """A view of all the room that one new slot has."""
        self.tables.check(slot)
        room = int(self.tables.counts[slot]) * self.block_size
        return self.view([slot], [room - self.get_seq_len(slot)])

    def batched_prefill_view(self, slots: Sequence[int], lens: Sequence[int]) -> CacheView:
        """A view of several slots that each take `lens[i]` new tokens."""
        return self.view(slots, lens)

    def decode_view(self, slots: Sequence[int]) -> CacheView:
        """A view of slots that each take one new token."""
        return self.view(slots, [1] * len(slots))

    def free_slot(self, slot: int) -> None:
        """See KVCachePool. Blocks go back last to first, so that a prefix outlives its tail."""
        self.tables.check(slot)
        if self._sharing is not None:
            self._rewind_sharers(self._sharing.close(slot))
        self._release(self.tables.blocks(slot)[::-1], slot)
        self._reserved.pop(slot, None)
        self._forked.discard(slot)
        del self._cached[slot]
        self.tables.remove(slot)

    def get_seq_len(self, slot: int) -> int:
        """See KVCachePool."""
        self.tables.check(slot)
        return int(self.tables.lengths[slot])

    def cached_tokens(self, slot: int) -> int:
        """See KVCachePool."""
        self.tables.check(slot)
        return self._cached[slot]

    def prefix_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        """See KVCachePool."""
        return len(self.index.match(token_ids, salt)) * self.block_size if self.index is not None else 0

    def free_slot_count(self) -> int:
        """See KVCachePool."""
        return self.allocator.num_free()

    def stats(self) -> PoolStats:
        """See KVCachePool."""
        allocator = self.allocator
        return PoolStats(
            block_size=self.block_size,
            blocks_total=allocator.num_blocks,
            blocks_in_use=allocator.num_allocated(),
            tokens_stored=self._occupancy.tokens,
            blocks_cached=allocator.num_evictable(),
            shared_blocks=allocator.num_references - allocator.num_allocated(),
            sequences=len(self.tables),
            kv_bytes=self.storage.num_bytes if self.storage is not None else 0,
        )

    def counters(self) -> PoolCounters:
        """See KVCachePool."""
        allocator = self.allocator
        return PoolCounters(
            blocks_allocated=allocator.total_allocated,
            blocks_freed=allocator.total_freed,
            evictions=allocator.evictions,
            evicted_blocks=allocator.evicted_blocks,
            cow_copies=self._cow_copies,
            merged_blocks=self._merged,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            same_step_hit_tokens=self._same_step_tokens,
            recompute_hit_tokens=self._recompute_tokens,
        )

    def audit(self) -> list[Finding]:
        """See KVCachePool."""
        return audit(self.allocator, self.tables, self.index)

    def reclaim_leaked_blocks(self) -> int:
        """See KVCachePool."""
        freed = 0
        for owner, blocks in self.allocator.find_leaked_blocks(self.tables.live).items():
            freed += len(self._release(blocks, owner))
        named = {block for slot in self.tables.live for block in self.tables.blocks(slot)}
        lost = self.allocator.find_unreferenced_blocks(named)
        freed += self.allocator.force_free(lost)
        self._occupancy.release(lost)
        return freed

    @abstractmethod
    def free_token_capacity(self) -> int | None:
        """See KVCachePool."""

    @abstractmethod
    def is_paged(self) -> bool:
        """See KVCachePool."""

    @abstractmethod
    def _initial_blocks(self, tokens: int) -> int:
        """Blocks that a new slot takes for its first tokens."""

    @abstractmethod
    def _fork_blocks(self, slot: int) -> list[int]:
        """The blocks of a copy of a slot."""

    @abstractmethod
    def _own_fork(self, slot: int, copy: int, blocks: list[int]) -> None:
        """Give the copy its references, and its content where it has blocks of its own."""

    def _append_blocks(self, slot: int, count: int) -> None:
        blocks = self.allocator.allocate(count, slot)
        self._occupancy.clear(blocks)
        self.tables.append(slot, blocks)

    def _append_one(self, rows: NDArray[np.int64]) -> None:
        """A block for each of these slots, as decoding takes them; cheaper than one by one."""
        if len(rows):
            blocks = [self.allocator.allocate(1, slot)[0] for slot in rows.tolist()]
            self._occupancy.clear(blocks)
            self.tables.append_one(rows, blocks)

    def _release(self, blocks: Sequence[int], owner: object) -> list[int]:
        released = self.allocator.free(blocks, owner)
        self._occupancy.release(released)
        return released

    def _count_hits(self, slot: int, tokens: int, hits: list[int], *, resumed: bool) -> None:
        hit_tokens = len(hits) * self.block_size
        self.allocator.touch(hits)
        self.tables.stored[slot] = hit_tokens
        # The last token of a prompt is run in any case: its logits pick the next one.
        self.tables.lengths[slot] = self._cached[slot] = min(hit_tokens, max(tokens - 1, 0))
        if resumed:
            self._recompute_tokens += hit_tokens
            return
        self._prompt_tokens += tokens
        self._hit_tokens += hit_tokens
        if self._sharing is not None:
            self._same_step_tokens += self.block_size * sum(map(self._sharing.is_pending, hits))

    def _reserve_missing(
        self, slots: Sequence[int], new_tokens: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        missing: list[tuple[int, int]] = []
        for slot, count in zip(slots, new_tokens, strict=False):
            reserved = self._reserved.get(slot)
            if reserved is None:
                missing.append((slot, count))
            elif reserved != count:
                raise SlotError(f"slot {slot}: {reserved} tokens were reserved for this step, not {count}")
        rows, new = self._check_step(slots, new_tokens)
        self.reserve([slot for slot, _ in missing], [count for _, count in missing])
        return rows, new

    def _check_idle(self, slot: int) -> None:
        self.tables.check(slot)
        if slot in self._reserved:
            raise SlotError(f"slot {slot} is in a step")

    def _check_step(
        self, slots: Sequence[int], new_tokens: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if len(slots) != len(new_tokens):
            raise SlotError(f"{len(slots)} slots but {len(new_tokens)} token counts")
        distinct = set(slots)
        sound = len(distinct) == len(slots) and distinct <= self.tables.live and {int}.issuperset(map(type, slots))
        if not (sound and {int}.issuperset(map(type, new_tokens)) and min(new_tokens, default=1) >= 1):
            self._refuse_step(slots, new_tokens)
        rows = np.asarray(slots, dtype=np.int64)
        new = np.asarray(new_tokens, dtype=np.int64)
        over = np.flatnonzero(self.tables.lengths[rows] + new > self.max_seq_len)
        if len(over):
            slot = int(rows[over[0]])
            raise SlotError(
                f"slot {slot}: {self.get_seq_len(slot)} + {int(new[over[0]])} tokens are more than "
                f"max_seq_len={self.max_seq_len}"
            )
        return rows, new

    def _refuse_step(self, slots: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Raise SlotError for the first slot or count that is wrong."""
        seen: set[int] = set()
        for slot, count in zip(slots, new_tokens, strict=True):
            self.tables.check(slot)
            if slot in seen:
                raise SlotError(f"slot {slot} is given twice in one step")
            if type(count) is not int or count < 1:
                raise SlotError(f"slot {slot}: {count} new tokens; must be a whole number, at least 1")
            seen.add(slot)

    def _copies_before_write(self, slots: Sequence[int], new_tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Entries (slot, index) of blocks that the step writes and others reference. Of several slots that
        write one block, the last needs no copy if nobody else references it.
        """
        copies: list[tuple[int, int]] = []
        if not self._forked:
            return copies
        left: dict[int, int] = {}
        for slot, count in zip(slots, new_tokens, strict=True):
            if slot not in self._forked:
                continue
            first, end = int(self.tables.stored[slot]), int(self.tables.lengths[slot]) + count
            written = range(
                first // self.block_size, min(-(-end // self.block_size), int(self.tables.counts[slot]))
            )
            for entry in written if end > first else ():
                block = int(self.tables.entries[slot, entry])
                references = left.get(block, self.allocator.ref_count(block))
                if references > 1:
                    copies.append((slot, entry))
                    left[block] = references - 1
        return copies

    def _check_demand(
        self, rows: NDArray[np.int64], wanted: NDArray[np.int64], copies: list[tuple[int, int]]
    ) -> None:
        """Raise OutOfBlocksError, naming the slots behind the last that fits, unless all of the step fits."""
        demand = np.maximum(wanted, 0)
        if copies:
            position = {int(row): index for index, row in enumerate(rows)}
            for slot, _ in copies:
                demand[position[slot]] += 1
        free = self.allocator.num_free()
        if demand.sum() > free:
            refused = rows[(np.cumsum(demand) > free) & (demand > 0)].tolist()
            raise OutOfBlocksError(
                int(demand.sum()),
                free,
                self.allocator.num_blocks,
                evictable=self.allocator.num_evictable(),
                slots=refused,
            )

    def _copy_on_write(self, slot: int, entry: int) -> None:
        shared = int(self.tables.entries[slot, entry])
        (own,) = self.allocator.allocate(1, slot)
        if self.storage is not None:
            self.storage.copy_blocks([shared], [own])
        self.tables.replace(slot, entry, own)
        self._release([shared], slot)
        self._occupancy.clear([own])
        self._occupancy.fill(own, min(int(self.tables.stored[slot]) - entry * self.block_size, self.block_size))
        self._cow_copies += 1

    def _advance(self, rows: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        slots, counts = rows.tolist(), new.tolist()
        reserved = [self._reserved.get(slot) for slot in slots]
        if reserved != counts:
            slot = next(s for s, was, count in zip(slots, reserved, counts, strict=True) if was != count)
            raise SlotError(f"slot {slot} left the step before it was done")
        before = self.tables.lengths[rows]
        after = before + new
        self._occupancy.write(self.tables, rows, after)
        self.tables.lengths[rows] = after
        self.tables.stored[rows] = np.maximum(self.tables.stored[rows], after)
        for slot in slots:
            del self._reserved[slot]
        if self._sharing is not None:
            for index in np.flatnonzero(after // self.block_size > before // self.block_size).tolist():
                slot = int(rows[index])
                for entry, block in self._sharing.settle(slot):
                    self._merge(slot, entry, block)

    def _merge(self, slot: int, entry: int, block: int) -> None:
        """Map an entry to a block of the same content, and give back the slot's own."""
        own = int(self.tables.entries[slot, entry])
        self._occupancy.revive(self.allocator.share([block], slot))
        self.tables.replace(slot, entry, block)
        self._release([own], slot)
        self._merged += 1

    def _rollback(self, rows: NDArray[np.int64]) -> None:
        open_slots = [slot for slot in rows.tolist() if self._reserved.pop(slot, None) is not None]
        if self._sharing is None:
            return
        self._rewind_sharers([block for slot in open_slots for block in self._sharing.retract(slot)])

    def _rewind_sharers(self, retracted: list[int]) -> None:
        """Slots that counted on blocks which were not computed after all compute those tokens themselves; a step
        they were reserved for is off.
        """
        while retracted and self._sharing is not None:
            lost, retracted = retracted, []
            for slot in self._sharing.borrowers(lost):
                self._reserved.pop(slot, None)
                retracted += self._sharing.retract(slot)
                tokens = self._sharing.disown(slot, lost) * self.block_size
                self.tables.lengths[slot] = self.tables.stored[slot] = self._cached[slot] = tokens
                self._forked |= self.tables.live  # whoever writes such a block first may have to copy it
