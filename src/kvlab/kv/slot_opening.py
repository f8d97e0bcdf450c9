"""Opens slots: with what the look-up finds of their tokens, and new blocks for the rest."""

from collections.abc import Sequence

from kvlab.core import Salt
from kvlab.errors import SlotError
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix_hits import PrefixHits
from kvlab.kv.prefix_lookup import PrefixLookup
from kvlab.kv.tiers.offload import Offload


def check_opening(tokens: int, max_seq_len: int, keep_free: int, salt: Salt) -> None:
    """Raise SlotError for what no slot can be opened with."""
    if tokens < 0 or keep_free < 0:
        raise SlotError(f"initial_tokens={tokens}, keep_free={keep_free}: must be at least 0")
    if tokens > max_seq_len:
        raise SlotError(f"{tokens} tokens are more than max_seq_len={max_seq_len}")
    if salt is not None and not isinstance(salt, str | int):
        raise SlotError(f"salt={salt!r}: must be text or a whole number")


class SlotOpener:
    """Gives a slot the blocks that it shares, those that are loaded for it, and new ones."""

    def __init__(
        self,
        groups: Sequence[GroupBlocks],
        lookup: PrefixLookup,
        offload: Offload,
        step_tokens: int,
        first_blocks: int,
    ) -> None:
        """No step computes more than `step_tokens` of a slot, which has at least `first_blocks`."""
        self._groups, self._lookup, self._offload = groups, lookup, offload
        self._step_tokens, self._first_blocks = step_tokens, first_blocks

    def open(
        self,
        tokens: int,
        token_ids: Sequence[int] | None,
        salt: Salt,
        first_tokens: int | None,
        keep_free: int,
        *,
        all_fit: bool,
        resumed: bool,
        swapped: int | None,
        reuse: bool,
    ) -> int:
        """See `KVCachePool.allocate_slot`; so many tokens fit into a slot."""
        offload, ledger = self._offload, self._groups[0].ledger
        allocator, size = ledger.allocator, ledger.tables.block_size
        swap = None if swapped is None else offload.swaps.by_ticket[swapped]
        hits = self._lookup.find((token_ids if reuse else None) or (), salt, swap)
        # The last token of a prompt is run in any case: its logits pick the next one.
        to_come, computed = (min(count * size, max(tokens - 1, 0)) for count in (hits.count, hits.ready))
        first = tokens if first_tokens is None else min(tokens, to_come + first_tokens)
        plans, demand, later, reused = [], 0, 0, 0
        for group, entries in zip(self._groups, hits.entries, strict=True):
            blocks = [offload.block_of(entry) for entry in entries] if hits.keys else entries
            behind = max(self._num_entries(group, first, to_come) - hits.count, 0)
            later += max(self._num_entries(group, tokens, to_come) - hits.count, 0) - behind
            plans.append((group, entries, blocks, behind))
            demand += behind + blocks.count(None)
            # A hit that nobody references takes a block out of the free queue too.
            reused += allocator.num_unreferenced(blocks)
        ledger.check_room(demand + reused + (later if all_fit else 0), keep_free)
        allocator.eviction.set_demand(salt, demand)
        offload.hold(hits.keys, hits.without)
        for group, _, blocks, _ in plans:  # all hits, before an allocation could evict those of another group
            slot = group.ledger.open(blocks, hits.count - len(blocks))
        for group, entries, blocks, behind in plans:
            entry, tables, in_pool = hits.count - len(entries), group.tables, entries
            if hits.keys:
                group.ledger.fill(slot, [entry + place for place, block in enumerate(blocks) if block is None])
                in_pool = [entry for entry in entries if isinstance(entry, int)]
            if behind:
                group.ledger.append(slot, behind)
            allocator.touch(in_pool)
            tables.stored[slot] = hits.stored * size
            tables.lengths[slot] = tables.cached[slot] = computed
            group.sharing.open(slot, token_ids, salt, in_pool if hits.ready else (), resumed=resumed)
        allocator.eviction.set_demand(salt, 0)
        if hits.keys:
            self._load(slot, hits)
        if swapped is not None:
            offload.swaps.blocks_in += len(hits.keys)
            offload.swaps.end(swapped)
        return slot

    def _num_entries(self, group: GroupBlocks, tokens: int, computed: int) -> int:
        """Entries of a slot that is opened for so many tokens: where there is a window, those that the next step
        may compute, as others are given back meanwhile.
        """
        if group.layers.window is not None:
            tokens = min(tokens, computed + self._step_tokens)
        return max(-(-tokens // group.tables.block_size), self._first_blocks)

    def _load(self, slot: int, hits: PrefixHits) -> None:
        """Begin to load what a slot found in tiers."""
        numbers, blocks = list[int](), list[int]()
        for group, entries in zip(self._groups, hits.entries, strict=True):
            first = hits.count - len(entries)
            own = [first + place for place, entry in enumerate(entries) if isinstance(entry, bytes)]
            numbers += own
            blocks += group.tables.entries[slot, own].tolist()
        self._offload.load(slot, hits.stored, hits.keys, blocks, numbers, tail=hits.tail)
