"""A pool of blocks: opens slots, copies them, frees them, and says what they hold.

To be read after `protocol.py`. The parts are `ledger` (who holds which block), `step_preparation` (from `reserve`
to `advance`), `copy_on_write`, and `sharing` with its index `prefix`; each group of layers has them
(`group_blocks`). `prefix_lookup` finds what is known of a prompt, for `slot_opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlab.core import PoolCounters, PoolStats, Salt
from kvlab.errors import CapacityError, SlotError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.audit import Finding, audit
from kvlab.kv.block_run import BlockRun
from kvlab.kv.block_sharing import BlockSharing
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.eviction import EvictionPolicy
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.groups import LayerGroup, longest_sequence
from kvlab.kv.growth import Growth
from kvlab.kv.journal import BlockJournal
from kvlab.kv.ledger import BlockLedger, reclaim
from kvlab.kv.occupancy import Occupancy
from kvlab.kv.prefix import PrefixIndex, salt_bytes
from kvlab.kv.prefix_lookup import PoolLookup, PrefixLookup, TierLookup, WindowLookup
from kvlab.kv.protocol import KVCachePool, Numbers
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.slot_opening import Opening, SlotOpener
from kvlab.kv.state_blocks import StateBlocks
from kvlab.kv.state_sharing import StateSharing
from kvlab.kv.step_preparation import StepPreparation
from kvlab.kv.table import BlockTables
from kvlab.kv.tiers.base import keys_behind
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.view import CacheView

if TYPE_CHECKING:
    from kvlab.kv.storage import KVStorage


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
        partial_reuse: bool = False,
        merge_equal: bool = True,
        eviction: EvictionPolicy | None = None,
        journal: BlockJournal | None = None,
        offload: Offload | None = None,
        groups: Sequence[LayerGroup] = (),
        step_tokens: int | None = None,
        ahead: bool = False,
    ) -> None:
        """`groups` of layers have tables of their own; (): all have the same. No step computes more than
        `step_tokens` of a sequence; None: any number. `ahead`: a step is reserved while the one before runs.
        `partial_reuse`: what is shared of a prefix may end within a block, but not where layers have groups; with
        `merge_equal` one of two equal blocks goes.
        """
        if num_blocks < 1:
            needed = f"{-(-max_seq_len // block_size)} blocks of {block_size} tokens"
            text = f"a pool of {num_blocks} blocks holds no sequence; one of {max_seq_len} tokens needs {needed}"
            raise CapacityError(text)
        self.max_seq_len, self.storage = max_seq_len, storage
        self.step_tokens = (1 + ahead) * (max_seq_len if step_tokens is None else step_tokens)  # that run at once
        self.shares_prefixes, self.index = prefix_sharing, PrefixIndex(block_size)
        self._finds_parts, self._merges = partial_reuse and not groups, merge_equal
        self.offload = offload if offload is not None and prefix_sharing else Offload(())
        on_evict = self.offload.evicted if self.offload.tiers else None
        self.allocator = BlockAllocator(num_blocks, eviction, self.index.prune, journal, on_evict)
        self.eviction = self.allocator.eviction
        self._occupancy = Occupancy(num_blocks, block_size)
        self.groups = [
            self._group(number, layers, block_size) for number, layers in enumerate(groups or (LayerGroup(()),))
        ]
        first = self.groups[0]
        self.tables, self._ledger, self._sharing = first.tables, first.ledger, first.sharing
        self._step = StepPreparation(self.groups, max_seq_len, ahead=ahead)
        self._has_windows = any(group.layers.window is not None for group in self.groups)
        self._lookup = self._prefix_lookup()
        self._opener = SlotOpener(
            self.groups, self._lookup, self.offload, self.step_tokens, self.first_blocks, self._step.give_back
        )
        self._growth = Growth(self.groups, self.step_tokens, fork_shares=self.fork_shares)
        self._prompt_tokens = self._expired_blocks = 0

    def _group(self, number: int, layers: LayerGroup, block_size: int) -> GroupBlocks:
        tables = BlockTables(-(-self.max_seq_len // block_size), block_size)
        ledger = BlockLedger(self.allocator, tables, self._occupancy, self.storage)
        sharing: BlockSharing = BlockSharing()
        if self.shares_prefixes:
            kind = partial(StateSharing, states=layers.states) if layers.has_state else PrefixSharing
            sharing = kind(self.index, ledger, number, parts=self._finds_parts, merges=self._merges)
        blocks = StateBlocks if layers.has_state else GroupBlocks
        return blocks(layers, ledger, CopyOnWrite(ledger), sharing)

    def _prefix_lookup(self) -> PrefixLookup:
        if not self.shares_prefixes:
            return PrefixLookup(self.groups)
        behind = WindowLookup if self._has_windows else TierLookup
        kind = behind if self.offload.tiers else PoolLookup
        return kind(self.groups, self.index, self.offload, parts=self._finds_parts)

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def max_sequence_tokens(self) -> int:
        layers, blocks = [group.layers for group in self.groups], self.allocator.num_blocks
        return longest_sequence(
            layers, blocks, self.block_size, step_tokens=self.step_tokens, most=self.max_seq_len
        )

    def fork_growth(self, tokens: int, known: int) -> int:
        return self._growth.of_fork(tokens, known)

    def slot_growth(self, slots: Sequence[int], tokens: Sequence[int], to_compute: Sequence[int]) -> int:
        return self._growth.of_slots(slots, tokens, to_compute)

    def allocate_slot(
        self,
        initial_tokens: int = 0,
        token_ids: Sequence[int] | None = None,
        *,
        salt: Salt = None,
        first_tokens: int | None = None,
        all_fit: bool = True,
        most_tokens: int | None = None,
        keep_free: int = 0,
        resumed: bool = False,
        swapped: int | None = None,
        reuse: bool = True,
    ) -> int:
        tokens = initial_tokens if token_ids is None else len(token_ids)
        asked = Opening(
            tokens, token_ids, salt, first_tokens, all_fit, most_tokens, keep_free, resumed, swapped, reuse
        )
        asked.check(self.max_seq_len)
        slot = self._opener.open(asked)
        self._prompt_tokens += 0 if resumed else tokens
        return slot

    def fork_slot(self, slot: int, token_ids: Sequence[int] | None = None, *, rerun_last: bool = False) -> int:
        self.tables.check(slot)
        if self.tables.reserved[slot]:
            raise SlotError(f"slot {slot} is in a step")
        self._refuse_loading([slot])
        self._ledger.check_room(0 if self.fork_shares else len(self.tables.blocks(slot)))
        for group in self.groups:
            copy = self._fork(group, slot, token_ids, rerun_last=rerun_last)
        return copy

    def _fork(self, group: GroupBlocks, slot: int, token_ids: Sequence[int] | None, *, rerun_last: bool) -> int:
        tables = group.tables
        group.sharing.publish_late([slot])
        blocks, first = group.to_fork(slot)
        copy = group.ledger.open(blocks, first)
        tables.lengths[copy] = max(tables.lengths[slot] - rerun_last, 0)
        tables.stored[copy] = tables.stored[slot]
        if self.fork_shares:
            group.copies.watch(slot, copy)
        else:
            for entry in range(len(blocks)):
                group.ledger.copy(copy, entry)
        group.sharing.fork(slot, copy, token_ids)
        return copy

    def pin_prefix(self, slot: int, tokens: int) -> None:
        self.tables.check(slot)
        self._sharing.pin(slot, tokens)

    def swap_out(self, slot: int, is_worth: Callable[[float, int], bool] | None = None) -> int | None:
        self.tables.check(slot)
        # Beside windows tokens are computed again from the blocks that the tiers have.
        if not self.offload.tiers or self._has_windows or self.is_loading(slot):
            return None
        if (computed := self._sharing.computed(slot)) is None:
            return None
        (token_ids, salt), size = computed, self.block_size
        blocks = self.tables.blocks(slot)[: -(-len(token_ids) // size)]
        keys = keys_behind([salt_bytes(salt)], self.index.parts(token_ids, 0, partial=True))
        if is_worth is not None:
            own = [key for key, block in zip(keys, blocks, strict=True) if self.allocator.ref_count(block) == 1]
            tokens = len(token_ids) - (len(blocks) - len(own)) * size
            if not is_worth(self.offload.copy_s(own), tokens):
                return None
        return self.offload.swaps.add(keys, blocks, len(token_ids), has_tail=len(token_ids) % size > 0)

    def end_swap(self, ticket: int) -> None:
        self.offload.swaps.end(ticket)

    def is_loading(self, slot: int) -> bool:
        return slot in self.offload.waiting

    def receive(self, now: float) -> list[int]:
        self.offload.now = now
        if self._sharing.is_preparing:
            return []
        arrived = self.offload.arrived()
        for slot, wait in arrived.items():
            self._lookup.receive(slot, wait)
        return list(arrived)

    def next_arrival(self) -> float | None:
        return self.offload.next_arrival()

    def await_arrival(self, seconds: float) -> None:
        self.offload.wait(seconds)

    def expire(self, now: float) -> bool:
        self.offload.now = now
        pinned, blocks = self.eviction.num_pinned, self.eviction.expire(now)
        if blocks:
            self.allocator.give_up(blocks)
            self._expired_blocks += len(blocks)
        return bool(blocks) or self.eviction.num_pinned < pinned

    def blocks(self, slot: int) -> NDArray[np.int32]:
        """The blocks that a slot holds, one group's behind the other's. Raises SlotError for a dead one."""
        self.tables.check(slot)
        return np.concatenate([np.asarray(group.tables.blocks(slot), dtype=np.int32) for group in self.groups])

    def free_slot(self, slot: int) -> None:
        self.tables.check(slot)
        self.offload.leave(slot)
        self._step.leave(slot)
        for group in self.groups:
            group.ledger.close(slot)

    def reserve(self, slots: Numbers, new_tokens: Numbers, proposed: Numbers | None = None) -> None:
        self._refuse_loading(slots)
        self._step.reserve(slots, new_tokens, proposed)

    def view(self, slots: Numbers, new_tokens: Numbers) -> CacheView:
        self._refuse_loading(slots)
        rows, new = self._step.reserve_missing(slots, new_tokens)
        return CacheView(
            self.tables,
            self.storage,
            rows,
            new,
            on_advance=self._step.advance,
            on_rollback=self._step.rollback,
            others=[group.tables for group in self.groups[1:]],
        )

    def run(self, decoding: NDArray[np.int64], chunk: tuple[int, int] | None = None) -> BlockRun:
        """A run of steps that are all alike. See `BlockRun`."""
        return BlockRun(self.groups, decoding, chunk)

    def prefill_view(self, slot: int) -> CacheView:
        """A view of all the room that one new slot has."""
        length = self.get_seq_len(slot)
        return self.view([slot], [int(self.tables.counts[slot]) * self.block_size - length])

    def batched_prefill_view(self, slots: Sequence[int], lens: Sequence[int]) -> CacheView:
        """A view of several slots that each take `lens[i]` new tokens."""
        return self.view(slots, lens)

    def decode_view(self, slots: Sequence[int]) -> CacheView:
        """A view of slots that each take one new token."""
        return self.view(slots, [1] * len(slots))

    def get_seq_len(self, slot: int) -> int:
        self.tables.check(slot)
        return int(self.tables.lengths[slot])

    def prefix_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        return self._lookup.find(token_ids, salt).count * self.block_size

    def common_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        return self._lookup.find(token_ids, salt).common * self.block_size

    def free_slot_count(self) -> int:
        return self.allocator.num_free()

    @property
    def tokens_stored(self) -> int:
        """As in `stats`."""
        return self._occupancy.tokens

    def stats(self) -> PoolStats:
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
            blocks_pinned=self.eviction.num_pinned,
            **self.offload.stats(),
        )

    def counters(self) -> PoolCounters:
        allocator, sharing, eviction = self.allocator, self._sharing, self.eviction
        return PoolCounters(
            blocks_allocated=allocator.total_allocated,
            blocks_freed=allocator.total_freed,
            evictions=allocator.evictions,
            evicted_blocks=allocator.evicted_blocks,
            cow_copies=sum(group.copies.copies for group in self.groups),
            merged_blocks=sum(group.sharing.merged_blocks for group in self.groups),
            prompt_tokens=self._prompt_tokens,
            hit_tokens=sharing.hit_tokens,
            same_step_hit_tokens=sharing.same_step_tokens,
            recompute_hit_tokens=sharing.recompute_tokens,
            expired_blocks=self._expired_blocks,
            quota_evictions=eviction.quota_evictions,
            pinned_evictions=eviction.pinned_evictions,
            pins_refused=sharing.pins_refused,
            **self.offload.counters(self.block_size),
        )

    def audit(self) -> list[Finding]:
        return audit(self.allocator, self.groups, self.index, self.offload)

    def close(self) -> None:
        self.offload.close()

    def _refuse_loading(self, slots: Numbers) -> None:
        """Raise SlotError for a slot whose blocks are not there yet."""
        waiting = self.offload.waiting
        for slot in slots if waiting else ():
            if slot in waiting:
                raise SlotError(f"slot {slot} is being loaded; it can be used once `receive` has named it")

    def reclaim_leaked_blocks(self) -> int:
        return reclaim([group.ledger for group in self.groups])
