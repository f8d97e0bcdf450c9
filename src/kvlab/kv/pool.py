"""A pool of blocks: opens slots, copies them, frees them, and says what they hold.

To be read after `protocol.py`. The parts are `ledger` (who holds which block), `step` (from `reserve` to
`advance`), `copy_on_write`, and `sharing` with its index `prefix`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlab.core import PoolCounters, PoolStats
from kvlab.errors import CapacityError, SlotError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.audit import Finding, audit
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.eviction import EvictionPolicy
from kvlab.kv.journal import BlockJournal
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.prefix import PrefixIndex, salt_bytes
from kvlab.kv.protocol import KVCachePool, Numbers, Salt
from kvlab.kv.retention import Retention
from kvlab.kv.run import BlockRun
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.step import StepPreparation
from kvlab.kv.storage import KVStorage
from kvlab.kv.table import BlockTables
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.view import CacheView


class BlockPool(KVCachePool):
    """What all pools are. A contiguous slot is a block of `max_seq_len` tokens, so that pools differ in the size of
    a block, in what admission may count on, and in what a fork shares.
    """

    first_blocks: ClassVar[int] = 0  # blocks of a slot without tokens
    fork_shares: ClassVar[bool] = True  # False: a fork copies every block at once

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
        offload: Offload | None = None,
    ) -> None:
        """An `eviction` that is a Retention can pin, and is told the time."""
        if num_blocks < 1:
            raise CapacityError(
                f"a pool of {num_blocks} blocks holds no sequence; one of {max_seq_len} tokens needs "
                f"{-(-max_seq_len // block_size)} blocks of {block_size} tokens"
            )
        self.max_seq_len = max_seq_len
        self.storage = storage
        self.tables = BlockTables(-(-max_seq_len // block_size), block_size)
        self.index = PrefixIndex(block_size) if prefix_sharing else None
        on_drop = None if self.index is None else self.index.prune
        self.retention = eviction if isinstance(eviction, Retention) else None
        self.offload = offload if self.index is not None else None
        on_evict = None if self.offload is None else self.offload.evicted
        self.allocator = BlockAllocator(num_blocks, eviction, on_drop, journal, on_evict)
        self._ledger = BlockLedger(self.allocator, self.tables, storage)
        self._copies = CopyOnWrite(self._ledger)
        self._sharing = PrefixSharing(self.index, self._ledger, self.retention) if self.index is not None else None
        self._step = StepPreparation(self._ledger, self._copies, self._sharing, max_seq_len)
        self._prompt_tokens = self._expired_blocks = 0

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def max_sequence_tokens(self) -> int:
        return min(self.max_seq_len, self.allocator.num_blocks * self.block_size)

    def allocate_slot(
        self,
        initial_tokens: int = 0,
        token_ids: Sequence[int] | None = None,
        *,
        salt: Salt = None,
        keep_free: int = 0,
        resumed: bool = False,
        swapped: int | None = None,
    ) -> int:
        tokens = initial_tokens if token_ids is None else len(token_ids)
        if tokens < 0 or keep_free < 0:
            raise SlotError(f"initial_tokens={tokens}, keep_free={keep_free}: must be at least 0")
        if tokens > self.max_seq_len:
            raise SlotError(f"{tokens} tokens are more than max_seq_len={self.max_seq_len}")
        if salt is not None and not isinstance(salt, str | int):
            raise SlotError(f"salt={salt!r}: must be text or a whole number")
        hits = self.index.match(token_ids, salt) if self.index is not None and token_ids else []
        found = self._find(token_ids, salt, hits) if self.offload is not None and token_ids else []
        tail = self._find_tail(swapped, len(hits), found) if swapped is not None else 0
        coming = self.offload.loading_blocks(found) if self.offload is not None and found else []
        fresh = max(-(-tokens // self.block_size), self.first_blocks) - len(hits) - len(coming)
        # A hit that nobody references takes a block out of the free queue too.
        self._ledger.check_room(fresh + sum(not self.allocator.ref_count(block) for block in hits), keep_free)
        if self.retention is not None:
            self.retention.ask(salt, fresh)
        if self.offload is not None and found:
            self.offload.hold(found)
        slot = self._ledger.open(hits + coming, fresh)
        if self.retention is not None:
            self.retention.ask(salt, 0)
        self.allocator.touch(hits)
        self.tables.stored[slot] = len(hits) * self.block_size
        # The last token of a prompt is run in any case: its logits pick the next one.
        computed = min(len(hits) * self.block_size, max(tokens - 1, 0))
        self.tables.lengths[slot] = self.tables.cached[slot] = computed
        self._prompt_tokens += 0 if resumed else tokens
        if self._sharing is not None:
            self._sharing.open(slot, token_ids, salt, hits, resumed=resumed)
        if self.offload is not None and found:
            first, last = len(hits), len(hits) + len(found)
            self.offload.load(slot, first, found, self.tables.entries[slot, first:last].tolist(), tail=tail)
        if self.offload is not None and swapped is not None:
            self.offload.swaps.blocks_in += len(found)
            self.offload.swaps.end(swapped)
        return slot

    def fork_slot(self, slot: int, token_ids: Sequence[int] | None = None, *, rerun_last: bool = False) -> int:
        tables = self.tables
        blocks = tables.blocks(slot)
        if tables.reserved[slot]:
            raise SlotError(f"slot {slot} is in a step")
        self._refuse_loading([slot])
        self._ledger.check_room(0 if self.fork_shares else len(blocks))
        if self._sharing is not None:
            self._sharing.catch_up([slot])
            blocks = tables.blocks(slot)
        copy = self._ledger.open(blocks)
        tables.lengths[copy] = max(tables.lengths[slot] - rerun_last, 0)
        tables.stored[copy], tables.cached[copy] = tables.stored[slot], tables.cached[slot]
        if self.fork_shares:
            self._copies.watch(slot, copy)
        else:
            for entry in range(len(blocks)):
                self._ledger.copy(copy, entry)
        if self._sharing is not None:
            self._sharing.fork(slot, copy, token_ids)
        return copy

    def pin_prefix(self, slot: int, tokens: int) -> None:
        self.tables.check(slot)
        if self._sharing is not None:
            self._sharing.pin(slot, tokens)

    def swap_out(self, slot: int, is_worth: Callable[[float, int], bool] | None = None) -> int | None:
        self.tables.check(slot)
        if self.offload is None or self.index is None or self._sharing is None or self.is_loading(slot):
            return None
        computed = self._sharing.computed(slot)
        if computed is None:
            return None
        (token_ids, salt), size = computed, self.block_size
        blocks = self.tables.blocks(slot)[: -(-len(token_ids) // size)]
        keys = self.offload.keys(salt_bytes(salt), self.index.parts(token_ids, 0, partial=True))
        if is_worth is not None:
            own = [key for key, block in zip(keys, blocks, strict=True) if self.allocator.ref_count(block) == 1]
            tokens = len(token_ids) - (len(blocks) - len(own)) * size
            if not is_worth(self.offload.copy_s(own), tokens):
                return None
        return self.offload.swaps.add(keys, blocks, len(token_ids), has_tail=len(token_ids) % size > 0)

    def end_swap(self, ticket: int) -> None:
        if self.offload is not None:
            self.offload.swaps.end(ticket)

    def is_loading(self, slot: int) -> bool:
        return self.offload is not None and slot in self.offload.waiting

    def receive(self, now: float) -> list[int]:
        if self.offload is None or self._sharing is None:
            return []
        self.offload.now = now
        if self._sharing.is_preparing:
            return []
        arrived = self.offload.arrived()
        for slot, wait in arrived.items():
            tiers = wait.loaded()
            has_tail = wait.tail and len(tiers) == len(wait.keys)
            whole = len(tiers) - bool(has_tail)
            if self._sharing.load(slot, wait.first, whole, wait.tail if has_tail else 0):
                self.offload.count_hits(tiers[:whole])
            if len(tiers) < len(wait.keys):  # another slot may wait for the same blocks, and write them too
                self._copies.watch(slot)
        return list(arrived)

    def next_arrival(self) -> float | None:
        return None if self.offload is None else self.offload.next_arrival()

    def await_arrival(self, seconds: float) -> None:
        if self.offload is not None:
            self.offload.wait(seconds)

    def expire(self, now: float) -> bool:
        if self.offload is not None:
            self.offload.now = now
        if self.retention is None:
            return False
        pinned, blocks = self.retention.num_pinned, self.retention.expire(now)
        if blocks:
            self.allocator.give_up(blocks)
            self._expired_blocks += len(blocks)
        return bool(blocks) or self.retention.num_pinned < pinned

    def free_slot(self, slot: int) -> None:
        self.tables.check(slot)
        if self.offload is not None:
            self.offload.leave(slot)
        self._step.leave(slot)
        self._ledger.close(slot)

    def reserve(self, slots: Numbers, new_tokens: Numbers, proposed: Numbers | None = None) -> None:
        self._refuse_loading(slots)
        self._step.reserve(slots, new_tokens, proposed)

    def view(self, slots: Numbers, new_tokens: Numbers) -> CacheView:
        self._refuse_loading(slots)
        rows, new = self._step.reserve_missing(slots, new_tokens)
        return CacheView(
            self.tables, self.storage, rows, new, on_advance=self._step.advance, on_rollback=self._step.rollback
        )

    def run(self, decoding: NDArray[np.int64], chunk: tuple[int, int] | None = None) -> BlockRun:
        """A run of steps that are all alike. See `BlockRun`."""
        return BlockRun(self._ledger, self._copies, self._sharing, decoding, chunk)

    def prefill_view(self, slot: int) -> CacheView:
        """A view of all the room that one new slot has."""
        return self.view([slot], [len(self.tables.blocks(slot)) * self.block_size - self.get_seq_len(slot)])

    def batched_prefill_view(self, slots: Sequence[int], lens: Sequence[int]) -> CacheView:
        """A view of several slots that each take `lens[i]` new tokens."""
        return self.view(slots, lens)

    def decode_view(self, slots: Sequence[int]) -> CacheView:
        """A view of slots that each take one new token."""
        return self.view(slots, [1] * len(slots))

    def get_seq_len(self, slot: int) -> int:
        self.tables.check(slot)
        return int(self.tables.lengths[slot])

    def cached_tokens(self, slot: int) -> int:
        self.tables.check(slot)
        return int(self.tables.cached[slot])

    def prefix_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        if self.index is None:
            return 0
        hits = self.index.match(token_ids, salt)
        return (len(hits) + len(self._find(token_ids, salt, hits))) * self.block_size

    def free_slot_count(self) -> int:
        return self.allocator.num_free()

    @property
    def tokens_stored(self) -> int:
        """As in `stats`."""
        return self._ledger.occupancy.tokens

    def stats(self) -> PoolStats:
        allocator = self.allocator
        return PoolStats(
            block_size=self.block_size,
            blocks_total=allocator.num_blocks,
            blocks_in_use=allocator.num_allocated(),
            tokens_stored=self._ledger.occupancy.tokens,
            blocks_cached=allocator.num_evictable(),
            shared_blocks=allocator.num_references - allocator.num_allocated(),
            sequences=len(self.tables),
            kv_bytes=self.storage.num_bytes if self.storage is not None else 0,
            blocks_pinned=self.retention.num_pinned if self.retention is not None else 0,
            **({} if self.offload is None else self.offload.stats()),
        )

    def counters(self) -> PoolCounters:
        allocator, sharing, retention = self.allocator, self._sharing, self.retention
        return PoolCounters(
            blocks_allocated=allocator.total_allocated,
            blocks_freed=allocator.total_freed,
            evictions=allocator.evictions,
            evicted_blocks=allocator.evicted_blocks,
            cow_copies=self._copies.copies,
            merged_blocks=sharing.merged_blocks if sharing is not None else 0,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=sharing.hit_tokens if sharing is not None else 0,
            same_step_hit_tokens=sharing.same_step_tokens if sharing is not None else 0,
            recompute_hit_tokens=sharing.recompute_tokens if sharing is not None else 0,
            expired_blocks=self._expired_blocks,
            quota_evictions=retention.quota_evictions if retention is not None else 0,
            pinned_evictions=retention.pinned_evictions if retention is not None else 0,
            pins_refused=sharing.pins_refused if sharing is not None else 0,
            **({} if self.offload is None else self.offload.counters(self.block_size)),
        )

    def audit(self) -> list[Finding]:
        return audit(self.allocator, self.tables, self.index, self.retention, self.offload)

    def close(self) -> None:
        if self.offload is not None:
            self.offload.close()

    def _find(self, token_ids: Sequence[int], salt: Salt, hits: Sequence[int]) -> list[Key]:
        """The contents behind these hits that are in a tier."""
        if self.offload is None or self.index is None:
            return []
        node = self.allocator.content(hits[-1]) if hits else None
        return self.offload.find(salt_bytes(salt), node, self.index.parts(token_ids, len(hits)))

    def _find_tail(self, ticket: int, hits: int, found: list[Key]) -> int:
        """Add the last block of what was swapped out, if it is not full and all before it was found: its tokens."""
        swapped = self.offload.swaps.by_ticket[ticket] if self.offload is not None else None
        if swapped is None or swapped.tail is None or self.offload is None:
            return 0
        whole, tail = divmod(swapped.tokens, self.block_size)
        if hits + len(found) != whole or not self.offload.is_stored(swapped.tail):
            return 0
        found.append(swapped.tail)
        return tail

    def _refuse_loading(self, slots: Numbers) -> None:
        """Raise SlotError for a slot whose blocks are not there yet."""
        if self.offload is not None and self.offload.waiting:
            for slot in slots:
                if slot in self.offload.waiting:
                    raise SlotError(f"slot {slot} is being loaded; it can be used once `receive` has named it")

    def reclaim_leaked_blocks(self) -> int:
        return self._ledger.reclaim()
