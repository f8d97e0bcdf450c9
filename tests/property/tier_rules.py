"""The part of a pool's machine that loads content from tiers: a slot waits for it while any other call goes on."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvlab.kv.prefix import salt_bytes
from kvlab.kv.protocol import Salt
from kvlab.kv.tiers.base import Key, key_behind
from kvlab.kv.tiers.offload import Offload
from tests.property.pool_machine import PoolMachine
from tests.property.reference import Step
from tests.property.sequence_rules import alphabet
from tests.support.tiers import SlowStore


class TieredRules(PoolMachine):
    """What is in a tier is not modelled, as what is in the index is not: what a block holds shows where it was."""

    sharing = True
    store: SlowStore
    seen: list[tuple[Salt, list[int]]]

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
        assert self.pool.index is not None
        keys, key = list[Key](), key_behind(b"", salt_bytes(salt))
        for place, part in enumerate(self.pool.index.parts(tokens, 0)):
            key = key_behind(key, part)
            if place < hits:
                continue
            if key not in self.offload._loading and not any(key in tier for tier in self.offload.tiers):
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
        slot = self.open(tokens[: self.pool.max_seq_len], salt)
        if slot is None:
            return
        if slot in self.loading:
            self.receive()
        content = self.model[slot]
        if (salt, content.tokens) not in self.seen:
            self.seen.append((salt, list(content.tokens)))
        left = len(content.tokens) - content.length
        if left and self.made_room([slot], [left], []):
            self.finish(Step(self.pool.view([slot], [left]), [slot], [left]))
        self.close(slot)

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
        loads = list(self.offload._loads)
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
            if good and content.hits == first and content.stored == first * size:
                self.count_hits(content, -1)
                content.hits = first + good
                self.count_hits(content, 1)
                content.stored = content.hits * size
                content.length = min(content.stored, len(content.tokens) - 1)
        self.loading.clear()

    @precondition(lambda self: bool(self.offload.tiers[1]._places))
    @rule(pick=st.integers(0, 20))
    def lose_a_page(self, pick: int) -> None:
        """It cannot be read any more; nobody knows before it is tried."""
        pages = sorted(self.offload.tiers[1]._places)
        self.store.broken.add(pages[pick % len(pages)])
