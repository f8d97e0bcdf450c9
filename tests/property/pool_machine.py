"""A pool driven by random calls beside a naive model of what it holds.

A rule is a call of the pool. It either succeeds, and the model does the same to plain Python objects, or is
expected to be refused, and then must have changed nothing. After each rule the invariants compare all that can be
seen of the pool with the model. To add a call (fork, sharing, eviction): one more rule, and where it changes how
many blocks a sequence costs, `expected_blocks_in_use`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pool import KVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.view import CacheView

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
KV = tuple[torch.Tensor, torch.Tensor]  # [kv_heads, tokens, head_dim] each

picks = st.integers(0, 11)  # "the n-th live slot", whichever that is when the rule runs
Wanted = list[tuple[int, int]]
steps: st.SearchStrategy[Wanted] = st.lists(st.tuples(picks, st.integers(1, 7)), min_size=1, max_size=4)


@dataclass
class Content:
    """What one slot should hold."""

    blocks: int
    layers: list[KV] = field(default_factory=lambda: [_no_tokens() for _ in range(SPEC.num_layers)])

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]


@dataclass
class Step:
    """A view that was neither advanced nor rolled back, and what was written through it."""

    view: CacheView
    slots: list[int]
    new: list[int]
    written: dict[int, list[KV]] = field(default_factory=dict)  # layer -> K and V for each slot


class PoolMachine(RuleBasedStateMachine):
    """What holds for both pools; subclasses say which pool, and what a new slot costs."""

    first_blocks = 0  # blocks of a slot that was opened without a token

    def make_pool(self) -> KVCachePool:
        raise NotImplementedError

    @initialize(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def start(self, lengths: list[int]) -> None:
        self.pool = self.make_pool()
        self.storage = self.pool.storage
        assert self.storage is not None
        self.model: dict[int, Content] = {}
        self.step: Step | None = None
        self.random = torch.Generator().manual_seed(0)
        self.allocated = self.freed = 0
        for length in lengths:
            self.allocate_slot(length, as_ids=False)

    # What the model expects

    def blocks_for(self, tokens: int) -> int:
        return max(self.first_blocks, -(-tokens // self.pool.block_size))

    def expected_blocks_in_use(self) -> int:
        return sum(content.blocks for content in self.model.values())

    @property
    def free_blocks(self) -> int:
        return self.pool.allocator.num_blocks - self.expected_blocks_in_use()

    # Helpers of rules

    def slot(self, pick: int) -> int:
        live = sorted(self.model)
        return live[pick % len(live)]

    def chosen(self, wanted: Wanted) -> tuple[list[int], list[int]]:
        """Each picked slot once, with its number of new tokens."""
        tokens = {self.slot(pick): new for pick, new in reversed(wanted)}
        return list(tokens), list(tokens.values())

    def too_long(self, slots: list[int], new: list[int]) -> bool:
        return any(self.model[s].length + n > self.pool.max_seq_len for s, n in zip(slots, new, strict=True))

    def snapshot(self) -> tuple[object, ...]:
        pool, live = self.pool, sorted(self.pool.tables.live)
        return (
            {slot: pool.tables.blocks(slot) for slot in live},
            {slot: pool.get_seq_len(slot) for slot in live},
            {block: pool.allocator.ref_count(block) for block in range(pool.allocator.num_blocks)},
            pool.free_slot_count(),
            pool.free_token_capacity(),
            pool.stats(),
        )

    @contextmanager
    def refused(self, error: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
        """The body raises `error` and leaves everything as it was."""
        before = self.snapshot()
        with pytest.raises(error, match=match) as caught:
            yield caught
        assert self.snapshot() == before

    def random_kv(self, tokens: int) -> KV:
        shape = (SPEC.num_kv_heads, tokens, SPEC.head_dim)
        return torch.randn(shape, generator=self.random), torch.randn(shape, generator=self.random)

    # Opening and closing slots

    @rule(tokens=st.integers(0, 20), as_ids=st.booleans())
    def allocate_slot(self, tokens: int, as_ids: bool) -> None:
        arguments = {"token_ids": list(range(tokens))} if as_ids else {"initial_tokens": tokens}
        blocks = self.blocks_for(tokens)
        if tokens > self.pool.max_seq_len:
            with self.refused(SlotError, match=f"{tokens} tokens"):
                self.pool.allocate_slot(**arguments)
        elif blocks > self.free_blocks:
            with self.refused(OutOfBlocksError) as caught:
                self.pool.allocate_slot(**arguments)
            assert (caught.value.wanted, caught.value.free) == (blocks, self.free_blocks)
        else:
            slot = self.pool.allocate_slot(**arguments)
            assert slot not in self.model
            self.model[slot] = Content(blocks)
            self.allocated += blocks

    @precondition(lambda self: self.model)
    @rule(pick=picks)
    def free_slot(self, pick: int) -> None:
        slot = self.slot(pick)
        if self.step is not None and slot in self.step.slots:
            self.rollback()
        self.pool.free_slot(slot)
        self.freed += self.model.pop(slot).blocks

    # Making room

    @precondition(lambda self: self.model)
    @rule(wanted=steps)
    def reserve(self, wanted: Wanted) -> None:
        self.made_room(*self.chosen(wanted))

    def made_room(self, slots: list[int], new: list[int]) -> bool:
        """Reserve; True if there was room for all."""
        if self.too_long(slots, new):
            with self.refused(SlotError, match="max_seq_len"):
                self.pool.reserve(slots, new)
            return False
        lacking = {}
        for slot, tokens in zip(slots, new, strict=True):
            content = self.model[slot]
            lacking[slot] = max(0, self.blocks_for(content.length + tokens) - content.blocks)
        if sum(lacking.values()) > self.free_blocks:
            with self.refused(OutOfBlocksError) as caught:
                self.pool.reserve(slots, new)
            error = caught.value
            assert (error.wanted, error.free) == (sum(lacking.values()), self.free_blocks)
            demand = dict(zip(slots, accumulate(lacking.values()), strict=True))
            assert error.slots == tuple(slot for slot in slots if lacking[slot] and demand[slot] > self.free_blocks)
            return False
        self.pool.reserve(slots, new)
        for slot, blocks in lacking.items():
            self.model[slot].blocks += blocks
            self.allocated += blocks
        return True

    # A whole step: reserve, view, write every layer, advance; beside a step that is open on other slots

    @precondition(lambda self: self.model)
    @rule(wanted=steps)
    def run_step(self, wanted: Wanted) -> None:
        busy = self.step.slots if self.step is not None else []
        slots, new = self.chosen(wanted)
        pairs = [(slot, tokens) for slot, tokens in zip(slots, new, strict=True) if slot not in busy]
        slots, new = [slot for slot, _ in pairs], [tokens for _, tokens in pairs]
        if self.made_room(slots, new):
            self.finish(Step(self.pool.view(slots, new), slots, new))

    @precondition(lambda self: self.model)
    @rule()
    def decode_all(self) -> None:
        self.run_step([(index, 1) for index in range(len(self.model))])

    # A step in parts, with any other call in between

    @precondition(lambda self: self.model and self.step is None)
    @rule(wanted=steps, reserved=st.booleans())
    def view(self, wanted: Wanted, reserved: bool) -> None:
        slots, new = self.chosen(wanted)
        if reserved and not self.made_room(slots, new):
            return
        contents = [self.model[slot] for slot in slots]
        lengths = [content.length + tokens for content, tokens in zip(contents, new, strict=True)]
        rooms = [content.blocks * self.pool.block_size for content in contents]
        if self.too_long(slots, new) or any(length > room for length, room in zip(lengths, rooms, strict=True)):
            with self.refused(SlotError):
                self.pool.view(slots, new)
            return
        view = self.pool.view(slots, new)
        assert view.lengths == lengths
        assert view.num_new == new
        assert view.is_paged is self.pool.is_paged()
        self.step = Step(view, slots, new)

    @precondition(lambda self: self.step is not None)
    @rule(layer=st.integers(0, SPEC.num_layers - 1))
    def write(self, layer: int) -> None:
        assert self.step is not None
        self.write_layer(self.step, layer)

    @precondition(lambda self: self.step is not None)
    @rule()
    def advance(self) -> None:
        assert self.step is not None
        self.finish(self.step)
        self.step = None

    @precondition(lambda self: self.step is not None)
    @rule()
    def rollback(self) -> None:
        assert self.step is not None
        self.step.view.rollback()
        self.closed(self.step)
        self.step = None

    def write_layer(self, step: Step, layer: int) -> None:
        written = [self.random_kv(tokens) for tokens in step.new]
        if written:
            k, v = (torch.cat([kv[part] for kv in written], dim=1).transpose(0, 1) for part in (0, 1))
            step.view.update(layer, k.contiguous(), v.contiguous())
        step.written[layer] = written

    def finish(self, step: Step) -> None:
        """A model writes every layer before it advances."""
        for layer in range(SPEC.num_layers):
            if layer not in step.written:
                self.write_layer(step, layer)
        step.view.advance()
        for index, slot in enumerate(step.slots):
            layers = self.model[slot].layers
            for layer, written in step.written.items():
                layers[layer] = _join(layers[layer], written[index])
        self.closed(step)

    def closed(self, step: Step) -> None:
        for call in (step.view.advance, step.view.rollback):
            with self.refused(RuntimeError, match="already"):
                call()

    # Calls that no state allows

    @precondition(lambda self: self.model)
    @rule(pick=picks, dead=st.integers(-1, 40))
    def misuse(self, pick: int, dead: int) -> None:
        pool, slot = self.pool, self.slot(pick)
        if dead not in self.model:
            for query in (pool.free_slot, pool.get_seq_len, pool.prefill_view):
                with self.refused(SlotError, match=f"slot {dead} is not live"):
                    query(dead)
        for call in (pool.reserve, pool.view):
            if dead not in self.model:
                with self.refused(SlotError, match=f"slot {dead} is not live"):
                    call([slot, dead], [1, 1])
            with self.refused(SlotError, match=f"slot {slot} is given twice"):
                call([slot, slot], [1, 1])
            with self.refused(SlotError, match=f"slot {slot}: 0 new tokens"):
                call([slot], [0])
            with self.refused(SlotError, match="1 slots but 2 token counts"):
                call([slot], [1, 1])

    # What holds after each rule

    @invariant()
    def no_finding(self) -> None:
        assert self.pool.audit() == []

    @invariant()
    def stored_content_is_bit_for_bit(self) -> None:
        """Of every sequence, through the gather that attention uses, and through block and offset."""
        slots = [slot for slot, content in self.model.items() if content.length]
        view = look(self.pool, slots)
        for index, slot in enumerate(slots):
            content = self.model[slot]
            assert view.lengths[index] == self.pool.get_seq_len(slot) == content.length
            block, offset = self.pool.tables.locate(slot, content.length - 1)
            for layer, (k, v) in enumerate(content.layers):
                keys, values = view.gather(layer, index)
                assert torch.equal(keys, k)
                assert torch.equal(values, v)
                assert torch.equal(view.keys(layer)[block, :, offset], k[:, -1])
                assert torch.equal(view.values(layer)[block, :, offset], v[:, -1])

    @invariant()
    def an_open_view_sees_what_was_written(self) -> None:
        if self.step is None:
            return
        for layer, written in self.step.written.items():
            for index, slot in enumerate(self.step.slots):
                k, v = _join(self.model[slot].layers[layer], written[index])
                keys, values = self.step.view.gather(layer, index)
                assert torch.equal(keys, k)
                assert torch.equal(values, v)

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        pool, stats = self.pool, self.pool.stats()
        tokens = sum(content.length for content in self.model.values())
        in_use = self.expected_blocks_in_use()
        assert pool.tables.live == set(self.model)
        for slot, content in self.model.items():
            assert len(pool.tables.blocks(slot)) == content.blocks
        assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (in_use, len(self.model), tokens)
        assert (stats.blocks_total, stats.block_size) == (pool.allocator.num_blocks, pool.block_size)
        assert (stats.blocks_allocated, stats.blocks_freed) == (self.allocated, self.freed)
        assert pool.free_slot_count() == self.free_blocks
        assert pool.free_token_capacity() == (self.free_blocks * pool.block_size if pool.is_paged() else None)
        assert stats.block_utilization == in_use / stats.blocks_total
        assert stats.token_utilization == tokens / (stats.blocks_total * stats.block_size)
        waste = 1 - tokens / (in_use * stats.block_size) if in_use else 0
        assert stats.internal_fragmentation == waste

    @invariant()
    def storage_is_never_replaced(self) -> None:
        assert self.storage is not None
        assert self.pool.storage is self.storage
        assert self.pool.stats().kv_bytes == self.storage.num_bytes

    def teardown(self) -> None:
        """Closing every slot leaves the pool as it was at the start."""
        for slot in list(self.model):
            self.pool.free_slot(slot)
        assert self.pool.audit() == []
        assert self.pool.allocator.num_free() == self.pool.allocator.num_blocks
        stats = self.pool.stats()
        assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (0, 0, 0)


def look(pool: KVCachePool, slots: list[int]) -> CacheView:
    """A view of what is stored, without a new token."""
    return CacheView(
        pool.tables,
        pool.storage,
        np.asarray(slots, dtype=np.int64),
        np.zeros(len(slots), dtype=np.int64),
        is_paged=pool.is_paged(),
        on_advance=lambda rows, new: None,
    )


def _join(stored: KV, added: KV) -> KV:
    return torch.cat([stored[0], added[0]], dim=1), torch.cat([stored[1], added[1]], dim=1)


def _no_tokens() -> KV:
    empty = torch.empty(SPEC.num_kv_heads, 0, SPEC.head_dim)
    return empty, empty
