"""A pool of groups of layers driven by random calls, its tensors beside what they should hold.

Each layer is a group with a window of its own, or a state in place of K and V. Whatever a query sees has to be in
the blocks of its layer bit for bit; blocks that nobody holds and that hold nothing to share are overwritten after
each call.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvlab.core import PoolStats
from kvlab.errors import OutOfBlocksError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.groups import STATE, LayerGroup
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from tests.support.content_listener import ContentListener, findable

LONGEST = 40


@dataclass
class Held:
    """A slot: its list of tokens, and how many of them are computed."""

    tokens: list[int]
    computed: int = 0


class GroupMachine:
    """Calls of a pool, and what follows from them."""

    def __init__(
        self,
        seed: int,
        windows: tuple[int | None, ...],
        size: int,
        blocks: int,
        eviction: str,
        *,
        states: int = 0,
        merge: bool = True,
    ) -> None:
        """Layers with a window of `STATE` have so many `states`."""
        self.random = random.Random(seed)
        self.windows, self.size, self.states = windows, size, states
        groups = tuple(
            LayerGroup((layer,), 2, states) if window == STATE else LayerGroup((layer,), window)
            for layer, window in enumerate(windows)
        )
        self.storage = KVStorage(KVSpec(len(windows), 1, 1, "float32", groups=groups), blocks, size)
        self.pool = PagedKVCachePool(
            blocks,
            size,
            LONGEST,
            self.storage,
            prefix_sharing=states != 1,
            merge_equal=merge,
            eviction=EVICTION_POLICIES.get(eviction)(),
            groups=groups,
            step_tokens=self.random.choice([3, 8, LONGEST]),
        )
        self.listener = ContentListener.to(self.pool)
        self.model: dict[int, Held] = {}
        self.refused = 0

    def number(self, layer: int, tokens: list[int]) -> float:
        """K and V of the last token, which follow from all before it."""
        return float(hash((layer, *tokens)) % 2**20)

    def prompt(self) -> list[int]:
        period = self.random.choice(([0], [0, 1], [1, 1, 0, 0, 1]))
        return (period * LONGEST)[: self.random.randint(1, LONGEST - 4)] + self.random.choices((0, 1), k=2)

    def open(self) -> None:
        tokens = self.prompt()
        before = self.pool.stats(), self.pool.prefix_tokens(tokens)
        try:
            slot = self.pool.allocate_slot(token_ids=tokens)
        except OutOfBlocksError:
            assert self.is_as(before[0])
            assert self.pool.prefix_tokens(tokens) == before[1]
            self.refused += 1
            return
        assert self.pool.get_seq_len(slot) == min(before[1], len(tokens) - 1)
        self.model[slot] = Held(tokens, self.pool.get_seq_len(slot))

    def is_as(self, before: PoolStats) -> bool:
        """Whether nothing was taken since, though what has left windows may have been given back."""
        after = self.pool.stats()
        return after.blocks_in_use <= before.blocks_in_use and after.sequences == before.sequences

    def fork(self, slot: int) -> None:
        held, rerun = self.model[slot], self.random.random() < 0.5
        rerun &= not self.states
        if self.states == 1:
            return
        if held.computed < len(held.tokens) or (rerun and not held.computed):
            return
        copy = self.pool.fork_slot(slot, tokens := list(held.tokens), rerun_last=rerun)
        self.model[copy] = Held(tokens, held.computed - rerun)

    def step(self, slots: list[int]) -> None:
        """Reserve, write every layer, then keep it, a part of what was proposed, or nothing."""
        new, proposed = [], []
        for slot in slots:
            held = self.model[slot]
            left = len(held.tokens) - held.computed
            if not left and not self.states and held.computed < LONGEST - 3 and self.random.random() < 0.3:
                held.tokens.append(self.random.randint(0, 1))
                proposed.append(2)
                new.append(3)
                continue
            if not left:
                held.tokens.append(self.random.randint(0, 1))
            proposed.append(0)
            new.append(self.random.randint(1, min(max(left, 1), self.pool.step_tokens)))
        before = self.pool.stats()
        try:
            self.pool.reserve(slots, new, proposed)
        except OutOfBlocksError:
            assert self.is_as(before)
            self.refused += 1
            return
        if self.random.random() < 0.4:  # it may share what this step fills
            self.open()
        view = self.pool.view(slots, new)
        guesses = [[self.random.randint(0, 1) for _ in range(count)] for count in proposed]
        numbers = [
            self.model[slot].tokens[: self.model[slot].computed + count - len(guess)] + guess
            for slot, count, guess in zip(slots, new, guesses, strict=True)
        ]
        failed = self.random.random() < 0.2
        for layer, window in enumerate(self.windows):
            if window == STATE:
                for slot, tokens, count in zip(slots, numbers, new, strict=True):
                    self.check_state(slot, layer, tokens[: len(tokens) - count])
                    if not failed:
                        self.keep_state(slot, layer, tokens, len(tokens) - count)
                continue
            values = [
                self.number(layer, tokens[:end])
                for tokens, count in zip(numbers, new, strict=True)
                for end in range(len(tokens) - count + 1, len(tokens) + 1)
            ]
            kv = torch.tensor(values).view(-1, 1, 1)
            view.of_layer(layer).update(layer, kv, kv)
            self.check_view(view, layer, numbers, new)
        if failed:
            view.rollback()
        else:
            kept = [count - self.random.randint(0, len(guess)) for count, guess in zip(new, guesses, strict=True)]
            view.advance(np.array(kept))
            for slot, count, tokens, whole in zip(slots, kept, numbers, new, strict=True):
                held = self.model[slot]
                held.computed += count
                held.tokens += tokens[len(held.tokens) : len(tokens) - whole + count]
        for slot, held in self.model.items():
            held.computed = self.pool.get_seq_len(slot)

    def block_of_state(self, slot: int, layer: int, tokens: int) -> int:
        """The block with the state of so many tokens; a slot has one, or one where they end."""
        table = self.pool.groups[layer].tables
        entry = int(table.counts[slot]) - 1 if self.states == 1 else (tokens - 1) // self.size
        return int(table.entries[slot, entry])

    def check_state(self, slot: int, layer: int, tokens: list[int]) -> None:
        """A step that begins behind these tokens has their state."""
        if tokens:
            block = self.block_of_state(slot, layer, len(tokens))
            assert self.storage.keys[0, block].flatten()[0] == self.number(layer, tokens)

    def keep_state(self, slot: int, layer: int, tokens: list[int], before: int) -> None:
        """The step writes its state, and that of the last block that it passes, where it has one for it."""
        self.storage.keys[0, self.block_of_state(slot, layer, len(tokens))] = self.number(layer, tokens)
        last = (len(tokens) - 1) // self.size
        block = int(self.pool.groups[layer].tables.entries[slot, last - 1])
        if self.states > 2 and (last - 1) * self.size >= before and block >= 0:
            self.storage.keys[0, block] = self.number(layer, tokens[: last * self.size])

    def check_view(self, view: CacheView, layer: int, numbers: list[list[int]], new: list[int]) -> None:
        """What the step's queries see of a layer."""
        window = self.windows[layer] or LONGEST
        for row, (tokens, count) in enumerate(zip(numbers, new, strict=True)):
            first = max(0, len(tokens) - count - window + 1)
            keys, values = view.of_layer(layer).gather(layer, row, first)
            expected = [self.number(layer, tokens[:end]) for end in range(first + 1, len(tokens) + 1)]
            assert keys.flatten().tolist() == values.flatten().tolist() == expected

    def check(self) -> None:
        assert self.pool.audit() == []
        self.listener.hear(self.pool)
        assert self.listener.contents == findable(self.pool)
        allocator = self.pool.allocator
        free = sorted(allocator.free_block_ids() - set(allocator.eviction.blocks()))
        self.storage.keys[:, free] = self.storage.values[:, free] = torch.nan
        for block, node in allocator._contents.items():
            group, tokens = _content(node)
            expected = [
                self.number(group, tokens[:end]) for end in range(len(tokens) - self.size + 1, len(tokens) + 1)
            ]
            if self.windows[group] == STATE:
                expected = [self.number(group, tokens)] * self.size
            assert self.storage.keys[0, block].flatten().tolist() == expected
        for slot in self.model:
            for part in self.pool.groups:
                computed, window = int(part.tables.lengths[slot]), part.layers.window
                first = 0 if window is None else max(computed + 1 - window, 0) // self.size
                assert part.tables.first[slot] <= first

    def run(self, calls: int) -> None:
        for _ in range(calls):
            slots = list(self.model)
            chosen = self.random.random()
            if not slots or chosen < 0.2:
                self.open()
            elif chosen < 0.28:
                self.fork(self.random.choice(slots))
            elif chosen < 0.4:
                self.pool.free_slot(slot := self.random.choice(slots))
                del self.model[slot]
            elif growing := [slot for slot in slots if self.model[slot].computed < LONGEST]:
                self.step(self.random.sample(growing, self.random.randint(1, min(3, len(growing)))))
            self.check()
        for slot in list(self.model):
            self.pool.free_slot(slot)
        assert self.pool.stats().blocks_in_use == 0
        assert self.pool.audit() == []


def _content(node: Prefix) -> tuple[int, list[int]]:
    """The group and the tokens of a content."""
    parts, group = [], 0
    while node.parent is not None:
        if len(node.tokens) < 8:
            group = int.from_bytes(node.tokens, "big")
        else:
            parts.append(np.frombuffer(node.tokens, dtype=np.int64).tolist())
        node = node.parent
    return group, [token for part in reversed(parts) for token in part]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("windows", "size", "blocks", "eviction"),
    [
        ((None, 5, 9), 4, 34, "lru"),
        ((None, 8, 8), 4, 30, "s3_fifo"),
        ((None, 1, 3), 2, 60, "cost"),
        ((7,), 3, 16, "lru"),
        ((6, 17), 4, 22, "lfu"),
        ((None, 3), 8, 14, "sieve"),
    ],
)
def test_every_layer_reads_what_was_written(
    windows: tuple[int | None, ...], size: int, blocks: int, eviction: str, seed: int
) -> None:
    machine = GroupMachine(seed, windows, size, blocks, eviction)
    machine.run(150)
    counters = machine.pool.counters()
    assert counters.hit_tokens
    assert counters.evicted_blocks


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    ("windows", "states", "size", "blocks"),
    [
        ((None, STATE, STATE), 1, 4, 34),
        ((None, STATE, STATE), 2, 4, 34),
        ((None, STATE), 3, 3, 30),
        ((None, 5, STATE), 2, 2, 60),
    ],
)
def test_every_step_begins_with_its_state(
    windows: tuple[int | None, ...], states: int, size: int, blocks: int, merge: bool, seed: int
) -> None:
    machine = GroupMachine(seed, windows, size, blocks, "lru", states=states, merge=merge)
    machine.run(150)
    counters = machine.pool.counters()
    assert bool(counters.hit_tokens) == bool(counters.evicted_blocks) == (states > 1)


@pytest.mark.parametrize("seed", range(4))
def test_equal_blocks_that_stay_are_read_as_the_first(seed: int) -> None:
    machine = GroupMachine(seed, (None, 5, 9), 4, 34, "lru", merge=False)
    machine.run(150)
    assert machine.pool.counters().merged_blocks == 0
