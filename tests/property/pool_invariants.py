"""What holds of a pool after each rule of its machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvlab.core import Salt
from kvlab.kv.pool import BlockPool
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.storage import KVStorage
from tests.property.reference import Content, Guess, Step, block_of, indexed, look, stored_kv_of
from tests.support.content_listener import ContentListener


class PoolInvariants(RuleBasedStateMachine):
    """Compares all that can be seen of the pool with the model."""

    sharing: bool
    parts = False  # what is found may end within a block
    pool: BlockPool
    storage: KVStorage | None
    model: dict[int, Content]
    step: Step | None
    prepared: dict[int, int]
    guesses: dict[int, Guess]
    counts: Counter[str]
    listener: ContentListener

    def references(self) -> Counter[int]:
        """Table entries of each block."""
        return Counter(block for slot in self.model for block in self.pool.tables.blocks(slot))

    @property
    def free_blocks(self) -> int:
        return self.pool.allocator.num_blocks - len(self.references())

    def guessed(self, slot: int) -> Content:
        """A slot with the tokens that are guessed for it."""
        content, guess = self.model[slot], self.guesses.get(slot)
        return content if guess is None else replace(content, tokens=content.tokens + guess.tokens)

    def holders(self) -> dict[int, list[tuple[int, Content]]]:
        """Who holds each block, and as which entry."""
        found: dict[int, list[tuple[int, Content]]] = {}
        for slot, content in self.model.items():
            for entry, block in enumerate(self.pool.tables.blocks(slot)):
                found.setdefault(block, []).append((entry, content))
        return found

    def held(self, holders: list[tuple[int, Content]], entry: int) -> int:
        """Tokens in a block that is its holders' `entry`; who counts on the coming step knows of more."""
        size = self.pool.block_size
        return max(
            (
                max(0, min(content.stored - entry * size, size))
                for _, content in holders
                if entry not in content.pending
            ),
            default=0,
        )

    def hits(self, tokens: Sequence[int], salt: Salt) -> list[int]:
        """The blocks that a prompt should find: those of its longest prefix in the index."""
        found, size, blocks = indexed(self.pool), self.pool.block_size, []
        for end in range(size, len(tokens) + 1, size):
            block = found.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def part(self, tokens: Sequence[int], salt: Salt, hits: int) -> int:
        """Tokens that a prompt should find of the block behind these hits."""
        if not self.parts:
            return 0
        start, end = hits * self.pool.block_size, len(tokens) - 1
        known = [
            (*content[start:], -1)
            for (under, content), block in indexed(self.pool).items()
            if under == salt
            and content[:start] == tuple(tokens[:start])
            and start < len(content) <= start + self.pool.block_size
            and not self.is_being_filled(block, hits)
        ]
        wanted = (*tokens[start : max(start, end)], -2)
        return max(
            (next(n for n, (a, b) in enumerate(zip(c, wanted, strict=False)) if a != b) for c in known), default=0
        )

    def is_being_filled(self, block: int, entry: int) -> bool:
        """Whether a block is published but not computed."""
        holders = self.holders()
        return block in holders and self.held(holders[block], entry) < self.pool.block_size

    @invariant()
    def no_finding(self) -> None:
        assert self.pool.audit() == []

    @invariant()
    def stored_content_is_bit_for_bit(self) -> None:
        """Of every sequence, through the gather that attention uses, and through block and offset."""
        assert self.storage is not None
        slots = [slot for slot, content in self.model.items() if content.length]
        view = look(self.pool, slots)
        tables = view.block_tables.tolist()
        for index, slot in enumerate(slots):
            content = self.model[slot]
            assert view.lengths[index] == self.pool.get_seq_len(slot) == content.length
            if content.pending:  # not computed yet
                continue
            expected = content.stored_kv(content.length, self.storage)
            for layer, (k, v) in enumerate(expected):
                keys, values = view.gather(layer, index)
                assert torch.equal(keys, k)
                assert torch.equal(values, v)
            entry, offset = divmod(content.length - 1, self.pool.block_size)
            assert self.pool.tables.locate(slot, content.length - 1) == (tables[index][entry], offset)
            assert torch.equal(block_of(self.storage, tables[index][entry])[:, :, :, offset], expected[:, :, :, -1])

    @invariant()
    def an_open_view_sees_what_was_written(self) -> None:
        if self.step is None:
            return
        inside = set(self.step.slots)
        for index, slot in enumerate(self.step.slots):
            content = self.model[slot]
            if not inside.issuperset(content.pending.values()):
                continue
            assert self.storage is not None
            expected = self.guessed(slot).stored_kv(self.step.view.lengths[index], self.storage)
            for layer in self.step.written:
                keys, values = self.step.view.gather(layer, index)
                assert torch.equal(keys, expected[layer, 0])
                assert torch.equal(values, expected[layer, 1])

    @invariant()
    def every_indexed_block_holds_what_the_index_says(self) -> None:
        """The cached ones too, that nobody references; all but those that the coming step fills."""
        if not self.pool.shares_prefixes:
            return
        assert self.storage is not None
        size, holders = self.pool.block_size, self.holders()
        pending = set()
        for (salt, tokens), block in indexed(self.pool).items():
            entry = -(-len(tokens) // size) - 1
            if block in holders and self.held(holders[block], entry) < size:
                pending.add(block)
                continue
            ends = range(entry * size + 1, len(tokens) + 1)
            kv = [stored_kv_of(salt, tokens[:end], self.storage.spec.dtypes) for end in ends]
            assert torch.equal(block_of(self.storage, block)[:, :, :, : len(kv)], torch.stack(kv, dim=3))
        if not self.prepared and self.step is None:
            assert not pending
        assert isinstance(self.pool._sharing, PrefixSharing)
        assert self.pool._sharing._pending == pending

    @invariant()
    def who_hears_its_events_knows_what_it_can_find(self) -> None:
        if self.pool.shares_prefixes:
            self.listener.hear(self.pool)
            whole = {key for key in indexed(self.pool) if not len(key[1]) % self.pool.block_size}
            assert {content[1:] for content in self.listener.contents} == whole

    @invariant()
    def every_full_block_is_indexed_and_stored_once(self) -> None:
        """Those whose tokens the pool knows: equal contents are one block."""
        found = indexed(self.pool)
        assert len(set(found.values())) == len(found)
        for slot, content in self.model.items():
            if not self.pool.shares_prefixes or not content.told:
                continue
            table = self.pool.tables.blocks(slot)
            filled = content.stored // self.pool.block_size
            sharing = self.pool._sharing
            if (
                isinstance(sharing, PrefixSharing) and slot in sharing._late
            ):  # what it kept is published with its next step
                filled = sharing._slots[slot].computed
            for entry in range(filled):
                assert found[content.key((entry + 1) * self.pool.block_size)] == table[entry]

    @invariant()
    def the_index_keeps_no_node_for_nothing(self) -> None:
        if not self.pool.shares_prefixes:
            return
        needed, roots = set(), set()
        assert isinstance(self.pool._sharing, PrefixSharing)
        waiting = [node for each in self.pool._sharing._slots.values() for node in each.pending]
        for node in (*self.pool.allocator._contents.values(), *waiting):
            above = node
            while above.parent is not None:
                needed.add(id(above))
                above = above.parent
            roots.add(above.tokens)
        assert {id(node) for node in self.pool.index.nodes()} == needed
        assert set(self.pool.index._roots) == roots

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        pool, stats, references = self.pool, self.pool.stats(), self.references()
        pending = pool._sharing._pending if isinstance(pool._sharing, PrefixSharing) else set()
        tokens = 0
        for block, holders in self.holders().items():
            is_full = block in pool.allocator._contents and block not in pending
            held = pool.block_size if is_full else self.held(holders, holders[0][0])
            assert pool._ledger.occupancy.held(block) == held
            tokens += held
        in_use, cached = len(references), set(pool.allocator._contents) - set(references)
        assert pool.tables.live == set(self.model)
        for slot, content in self.model.items():
            assert len(pool.tables.blocks(slot)) == content.blocks
            assert pool.allocator.owners.blocks_of(slot) == Counter(pool.tables.blocks(slot))
        for block in range(pool.allocator.num_blocks):
            assert pool.allocator.ref_count(block) == references[block]
        assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (in_use, len(self.model), tokens)
        assert (stats.blocks_total, stats.block_size) == (pool.allocator.num_blocks, pool.block_size)
        counters = pool.counters()
        assert counters.blocks_allocated - counters.blocks_freed == in_use
        assert stats.shared_blocks == references.total() - in_use
        assert stats.blocks_cached == len(cached)
        assert stats.blocks_pinned == (pool.eviction.num_pinned)
        assert pool.free_slot_count() == self.free_blocks
        assert pool.free_token_capacity() == (self.free_blocks * pool.block_size if pool.is_paged() else None)
        for name in ("prompt_tokens", "hit_tokens", "same_step_hit_tokens", "recompute_hit_tokens"):
            assert getattr(counters, name) == self.counts[name], name
        assert stats.block_utilization == in_use / stats.blocks_total
        waste = 1 - tokens / (in_use * stats.block_size) if in_use else 0
        assert stats.internal_fragmentation == waste

    @invariant()
    def storage_is_never_replaced(self) -> None:
        assert self.storage is not None
        assert self.pool.storage is self.storage
        assert self.pool.stats().kv_bytes == self.storage.num_bytes

    def teardown(self) -> None:
        """Closing every slot leaves nothing in use."""
        if not hasattr(self, "pool"):
            return
        for slot in list(self.model):
            self.pool.free_slot(slot)
        assert self.pool.audit() == []
        assert self.pool.allocator.num_free() == self.pool.allocator.num_blocks
        stats = self.pool.stats()
        assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (0, 0, 0)
        assert self.pool.counters().blocks_allocated == self.pool.counters().blocks_freed
