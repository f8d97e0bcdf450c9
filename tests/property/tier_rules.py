"""The part of a pool's machine that loads content from tiers: a slot waits for it while any other call goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvlab.core import Salt
from kvlab.kv.prefix import salt_bytes
from kvlab.kv.tiers.base import Key, key_behind
from kvlab.kv.tiers.offload import Offload
from tests.property.pool_machine import PoolMachine
from tests.property.reference import Step
from tests.property.sequence_rules import UNKNOWN, alphabet, picks
from tests.support.tiers import SlowStore


class Swapped(NamedTuple):
    """A sequence that gave up its slot, and may come back."""

    salt: Salt
    tokens: list[int]
    length: int


class TieredRules(PoolMachine):
    """What is in a tier is not modelled, as what is in the index is not: what a block holds shows where it was."""

    sharing = True
    store: SlowStore
    seen: list[tuple[Salt, list[int]]]
    swapped: dict[int, Swapped]  # by ticket

    def warm_up(self) -> None:
        """Whatever the tiers have room for is in them."""
        for number in range(4):
            self.serve([number % 2, number // 2, *[0, 1] * 5], None)

    @property
    def offload(self) -> Offload:
        assert self.pool.offload is not None
        return self.pool.offload

    def tiered(self, tokens: Sequence[int], salt: Salt, hits: int) -> list[Key]:
        """The contents behind these hits that a tier should have for a prompt."""
        assert self.pool.shares_prefixes
        keys, key = list[Key](), key_behind(b"", salt_bytes(salt))
        for place, part in enumerate(self.pool.index.parts(tokens, 0)):
            key = key_behind(key, part)
            if place < hits:
                continue
            if key not in self.offload.loading and not any(key in tier for tier in self.offload.tiers):
                break
            keys.append(key)
        return keys

    @precondition(lambda self: self.step is None and not self.prepared)
    @rule(pick=st.integers(0, 20))
    def serve_again(self, pick: int) -> None:
        """What was in the pool, so that others leave it."""
        salt, tokens = self.seen[pick % len(self.seen)]
        self.serve(tokens, salt)

    def serve(self, tokens: list[int], salt: Salt) -> None:
        """A prompt is computed and let go."""
        if (slot := self.compute(tokens, salt)) is not None:
            self.close(slot)

    def compute(self, tokens: list[int], salt: Salt) -> int | None:
        """A slot for a prompt that is computed, if it has room."""
        slot = self.open(tokens[: self.pool.max_seq_len], salt)
        if slot is None:
            return None
        if slot in self.loading:
            self.receive()
        content = self.model[slot]
        if (salt, content.tokens) not in self.seen:
            self.seen.append((salt, list(content.tokens)))
        left = len(content.tokens) - content.length
        if left and self.made_room([slot], [left], []):
            self.finish(Step(self.pool.view([slot], [left]), [slot], [left]))
        return slot

    @rule(pick=st.integers(0, 20), tail=st.lists(alphabet, max_size=2))
    def ask_again(self, pick: int, tail: list[int]) -> None:
        """For what was in the pool, and is in a tier more often than not."""
        salt, tokens = self.seen[pick % len(self.seen)]
        self.open([*tokens, *tail], salt)

    @precondition(lambda self: self.loading)
    @rule()
    def receive(self) -> None:
        """Everything that is on its way comes, unless a step is prepared that fills blocks."""
        pool, size = self.pool, self.pool.block_size
        loads = list(self.offload.loads)
        for load in loads:
            assert load.copy is not None
            load.copy.exception(10)
        lost = {key for load in loads if load.copy is not None for key in load.copy.result()[0]}
        failed = pool.counters().failed_pages
        slots = pool.receive(self.now)
        assert pool._sharing is not None
        if pool._sharing.is_preparing:
            assert not slots
            return
        assert slots == list(self.loading)
        assert pool.counters().failed_pages == failed + len(lost)
        for slot, (first, keys) in self.loading.items():
            content = self.model[slot]
            good = next((place for place, key in enumerate(keys) if key in lost), len(keys))
            tail = self.tails.pop(slot) if good == len(keys) else 0
            if good and content.hits == first and content.stored == first * size:
                self.count_hits(content, -1)
                content.hits = first + good - (tail > 0)
                self.count_hits(content, 1)
                content.stored = content.hits * size + tail
                content.length = min(content.stored, len(content.tokens) - 1)
        self.loading.clear()

    @precondition(lambda self: self.model and self.step is None)
    @rule(pick=picks)
    def swap_out(self, pick: int) -> None:
        """A sequence gives up its slot, and what it computed is held in a tier, if there is room."""
        slot = self.slot(pick)
        content, size = self.model[slot], self.pool.block_size
        filling = any(entry * size < content.length for entry in content.pending)
        unknown = any(token >= UNKNOWN for token in content.tokens[: content.length])
        ticket = self.pool.swap_out(slot)
        if slot in self.loading or unknown or not content.length or filling:
            assert ticket is None
        if ticket is not None:
            self.swapped[ticket] = Swapped(content.salt, list(content.tokens), content.length)
        self.close(slot)

    @precondition(lambda self: self.step is None and not self.prepared)
    @rule(tokens=st.lists(alphabet, min_size=1, max_size=12), others=st.integers(0, 3))
    def preempt(self, tokens: list[int], others: int) -> None:
        """The same of one that was computed, which comes back behind some others."""
        if (slot := self.compute(tokens, None)) is None:
            return
        self.swap_out(sorted(self.model).index(slot))
        for number in range(others):
            self.serve([number, *[1, 0, 0] * 3], None)
        if self.swapped:
            self.swap_in(-1, ends=False)

    @precondition(lambda self: self.swapped)
    @rule(pick=st.integers(0, 20), ends=st.booleans())
    def swap_in(self, pick: int, ends: bool) -> None:
        """It comes back, or ends."""
        ticket = list(self.swapped)[pick % len(self.swapped)]
        swapped = self.swapped[ticket]
        if ends:
            self.pool.end_swap(ticket)
        elif self.open(list(swapped.tokens), swapped.salt, resumed=True, swapped=ticket) is None:
            return
        del self.swapped[ticket]

    def tail_of(self, ticket: int, hits: int, behind: list[Key]) -> int:
        """Add the key of the last block of a sequence that comes back, if a tier should give it; its tokens."""
        assert self.pool.shares_prefixes
        swapped = self.swapped[ticket]
        whole, tail = divmod(swapped.length, self.pool.block_size)
        key = key_behind(b"", salt_bytes(swapped.salt))
        for part in self.pool.index.parts(swapped.tokens[: swapped.length], 0, partial=True):
            key = key_behind(key, part)
        if not tail or hits + len(behind) != whole or key in self.offload.loading:
            return 0
        if not any(key in tier for tier in self.offload.tiers):
            return 0
        behind.append(key)
        return tail

    @precondition(lambda self: bool(self.offload.tiers[1]._places))
    @rule(pick=st.integers(0, 20))
    def lose_a_page(self, pick: int) -> None:
        """It cannot be read any more; nobody knows before it is tried."""
        pages = sorted(self.offload.tiers[1]._places)
        self.store.broken.add(pages[pick % len(pages)])
