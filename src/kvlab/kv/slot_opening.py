"""Opens slots: with what the look-up finds of their tokens, and new blocks for the rest."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvlab.core import Salt
from kvlab.errors import SlotError
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import Prefix
from kvlab.kv.prefix_hits import PrefixHits
from kvlab.kv.prefix_lookup import PrefixLookup
from kvlab.kv.tiers.offload import Offload


class Opening(NamedTuple):
    """What a slot is to be opened with: see `KVCachePool.allocate_slot`."""

    tokens: int
    token_ids: Sequence[int] | None
    salt: Salt
    first_tokens: int | None
    all_fit: bool
    most_tokens: int | None
    keep_free: int
    resumed: bool
    swapped: int | None
    reuse: bool

    @property
    def known(self) -> Sequence[int]:
        """The tokens that may be found."""
        return (self.token_ids if self.reuse else None) or ()

    def check(self, max_seq_len: int) -> None:
        """Raise SlotError for what no slot of a pool with this limit can be opened with."""
        if self.tokens < 0 or self.keep_free < 0:
            raise SlotError(f"initial_tokens={self.tokens}, keep_free={self.keep_free}: must be at least 0")
        if self.tokens > max_seq_len:
            raise SlotError(f"{self.tokens} tokens are more than max_seq_len={max_seq_len}")
        if self.salt is not None and not isinstance(self.salt, str | int):
            raise SlotError(f"salt={self.salt!r}: must be text or a whole number")


class _Demand(NamedTuple):
    """What a slot takes."""

    hits: PrefixHits
    groups: list[tuple[GroupBlocks, list[Any], list[Any], int]]  # each's hits, their blocks, and how many behind
    first: int  # blocks to take now
    wanted: int  # free blocks that there have to be,
    lasting: int  # and beside those that are kept free: without what windows give back while a prompt is computed


class SlotOpener:
    """Gives a slot the blocks that it shares, those that are loaded for it, and new ones."""

    def __init__(
        self,
        groups: Sequence[GroupBlocks],
        lookup: PrefixLookup,
        offload: Offload,
        step_tokens: int,
        first_blocks: int,
        give_back: Callable[[], bool],
    ) -> None:
        """No step computes more than `step_tokens` of a slot, which has at least `first_blocks`. `give_back` gives
        back what has left windows; whether there was any.
        """
        self._groups, self._lookup, self._offload = groups, lookup, offload
        self._step_tokens, self._first_blocks, self._give_back = step_tokens, first_blocks, give_back

    def open(self, asked: Opening) -> int:
        """See `KVCachePool.allocate_slot`; so many tokens fit into a slot."""
        offload, ledger = self._offload, self._groups[0].ledger
        allocator, size = ledger.allocator, ledger.tables.block_size
        demand = self._demand(asked)
        if max(demand.wanted, demand.lasting + asked.keep_free) > allocator.num_free() and self._give_back():
            demand = self._demand(asked)
        ledger.check_room(demand.lasting, asked.keep_free)
        ledger.check_room(demand.wanted)
        hits, plans = demand.hits, demand.groups
        if any(group.is_computing(entries) for group, entries, *_ in plans):
            ledger.check_room(allocator.num_blocks + 1)  # as vLLM says it
        content, part = self._lookup.find_part(asked.known, asked.salt, hits)
        allocator.eviction.set_demand(asked.salt, demand.first)
        offload.hold(hits.keys, hits.without)
        for group, _, blocks, _ in plans:  # all hits, before an allocation could evict those of another group
            slot = group.ledger.open(blocks, hits.count - len(blocks))
        source = None if content is None else self._source(content)
        for group, entries, blocks, behind in plans:
            entry, tables, in_pool = hits.count - len(entries), group.tables, entries
            if hits.keys:
                group.ledger.fill(slot, [entry + place for place, block in enumerate(blocks) if block is None])
                in_pool = [entry for entry in entries if isinstance(entry, int)]
            if behind:
                group.extend(slot, behind)
            allocator.touch(in_pool)
            tables.stored[slot] = hits.stored * size
            # The last token of a prompt is run in any case: its logits pick the next one.
            tables.lengths[slot] = min(hits.ready * size, max(asked.tokens - 1, 0))
            shared = in_pool if hits.ready else ()
            group.sharing.open(slot, asked.token_ids, asked.salt, shared, resumed=asked.resumed, part=part)
            if source is not None:
                group.copies.copy_part(slot, hits.count, source, part)
        allocator.eviction.set_demand(asked.salt, 0)
        if hits.keys:
            self._load(slot, hits)
        if asked.swapped is not None:
            offload.swaps.blocks_in += len(hits.keys)
            offload.swaps.end(asked.swapped)
        return slot

    def _source(self, content: Prefix) -> int | None:
        """The block to copy a part of a content from. Without users and without contents behind it, it is given up
        instead, to be the next that is allocated, as in TensorRT-LLM.
        """
        allocator, block = self._groups[0].ledger.allocator, content.block
        is_needed = (
            block is None or allocator.ref_count(block) or content.children or block in allocator.eviction.kept()
        )
        if block is not None and not is_needed:
            allocator.clear_content(block)
        return block

    def _demand(self, asked: Opening) -> _Demand:
        """What a slot takes."""
        offload, ledger, tokens = self._offload, self._groups[0].ledger, asked.tokens
        swap = None if asked.swapped is None else offload.swaps.by_ticket[asked.swapped]
        hits = self._lookup.find(asked.known, asked.salt, swap)
        to_come = min(hits.count * ledger.tables.block_size, max(tokens - 1, 0))
        to_come += self._lookup.most_part
        first = tokens if asked.first_tokens is None else min(tokens, to_come + asked.first_tokens)
        plans, demand, whole, lasting, reused = [], 0, 0, 0, 0
        for group, entries in zip(self._groups, hits.entries, strict=True):
            blocks = [offload.block_of(entry) for entry in entries] if hits.keys else entries
            behind = max(self._num_entries(group, first, to_come) - hits.count, 0)
            plans.append((group, entries, blocks, behind))
            new = group.num_new(behind)
            demand += new + blocks.count(None)
            most = self._whole(group, tokens, asked.most_tokens, hits.count)
            whole += most + blocks.count(None)
            is_lasting = group.layers.window is None or asked.most_tokens is not None
            lasting += (most if is_lasting else min(most, new)) + blocks.count(None)
            # A hit that nobody references takes a block out of the free queue too.
            reused += ledger.allocator.num_unreferenced(blocks)
        wanted, kept = (max(demand, whole), max(demand, lasting)) if asked.all_fit else (demand, demand)
        return _Demand(hits, plans, demand, wanted + reused, kept + reused)

    def _num_entries(self, group: GroupBlocks, tokens: int, computed: int) -> int:
        """Entries of a slot that is opened with so many tokens: where there is a window, those that the next step
        may compute, as others are given back meanwhile.
        """
        if group.layers.window is not None:
            tokens = min(tokens, computed + self._step_tokens)
        return max(-(-tokens // group.tables.block_size), self._first_blocks)

    def _whole(self, group: GroupBlocks, tokens: int, most_tokens: int | None, found: int) -> int:
        """Blocks beside those that were `found` which a slot of so many tokens holds at most."""
        layers, size, steps = group.layers, group.tables.block_size, min(self._step_tokens, tokens)
        if most_tokens is None:  # as vLLM counts: what a window has left of those that were found is taken off too
            if layers.has_state:
                return group.num_new(-(-tokens // size) - found)
            return max(layers.most_blocks(tokens, size, steps) - found, 0)
        # Of a window what others hold too does not come free when they give it back.
        return layers.most_blocks(most_tokens, size, steps, found if layers.window is None else 0)

    def _load(self, slot: int, hits: PrefixHits) -> None:
        """Begin to load what a slot found in tiers."""
        numbers, blocks = list[int](), list[int]()
        for group, entries in zip(self._groups, hits.entries, strict=True):
            first = hits.count - len(entries)
            own = [first + place for place, entry in enumerate(entries) if isinstance(entry, bytes)]
            numbers += own
            blocks += group.tables.entries[slot, own].tolist()
        self._offload.load(slot, hits.stored, hits.keys, blocks, numbers, tail=hits.tail)
