"""The part of a pool's machine that opens, copies and closes slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvlab.core import Salt
from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pool import BlockPool
from kvlab.kv.prefix import Prefix
from kvlab.kv.retention import Retention
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.tiers.base import Key
from tests.property.pool_invariants import PoolInvariants
from tests.property.reference import Content, Guess, Step, indexed, state
from tests.support.content_listener import ContentListener

picks = st.integers(0, 11)  # "the n-th live slot", whichever that is when the rule runs
salts: st.SearchStrategy[Salt] = st.sampled_from([None, None, None, "tenant"])
alphabet = st.integers(0, 1)
UNKNOWN = 1000  # the first of the tokens that a pool is not told
lengths = st.one_of(st.integers(0, 9), st.integers(0, 20))
prompts = st.builds(  # few prefixes, so that hits are frequent
    lambda period, length: (period * 20)[:length],
    st.one_of(st.just([0]), st.lists(alphabet, min_size=1, max_size=6)),
    lengths,
)


class SequenceRules(PoolInvariants):
    """Opening, copying and closing slots; `PoolMachine` adds steps."""

    first_blocks = 0  # blocks of a slot that was opened without a token
    sharing = False

    def make_pool(self) -> BlockPool:
        raise NotImplementedError

    @initialize(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def start(self, lengths: list[int]) -> None:
        self.pool = self.make_pool()
        self.storage = self.pool.storage
        if self.pool.shares_prefixes:
            self.pool.allocator._on_drop = self.dropped
            self.listener = ContentListener.to(self.pool)
        self.model: dict[int, Content] = {}
        self.step: Step | None = None
        self.prepared: dict[int, int] = {}  # reserved for the coming step
        self.guesses: dict[int, Guess] = {}  # of slots in the coming step
        self.unknown = count(UNKNOWN)  # tokens that occur nowhere else
        self.counts: Counter[str] = Counter()
        self.gone: dict[int, int] = {}  # tokens that a slot had stored when it was closed
        self.now = 0.0
        self.pinning: dict[int, int] = {}  # blocks from the first on that a slot asks to be kept
        self.loading: dict[int, tuple[int, list[Key]]] = {}  # slots, their hits, and what comes from tiers behind
        self.tails: dict[int, int] = {}  # of those, tokens of a last block that comes and is not full
        self.warm_up()
        for length in lengths:
            self.open([0] * length, None)

    def warm_up(self) -> None:
        """Before the first rule."""

    def dropped(self, nodes: list[Prefix]) -> None:
        """No content is given up before one that continues it and that nobody references."""
        index = self.pool.index
        assert index is not None
        for node in index.nodes():
            if node.block is not None and node.parent in nodes:
                assert self.pool.allocator.ref_count(node.block) > 0
        index.prune(nodes)

    # What the model expects

    def blocks_for(self, tokens: int) -> int:
        return max(self.first_blocks, -(-tokens // self.pool.block_size))

    def tiered(self, tokens: Sequence[int], salt: Salt, hits: int) -> list[Key]:
        """What a prompt should find in tiers behind these hits."""
        return []

    def tail_of(self, ticket: int, hits: int, behind: list[Key]) -> int:
        """Tokens of the block behind all these that a sequence that was swapped out should find, too."""
        return 0

    # Helpers of rules

    def slot(self, pick: int) -> int:
        live = sorted(self.model)
        return live[pick % len(live)]

    def busy(self) -> set[int]:
        return {*self.prepared, *(self.step.slots if self.step is not None else ())}

    @contextmanager
    def refused(self, error: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
        """The body raises `error` and leaves everything as it was."""
        before = state(self.pool)
        with pytest.raises(error, match=match) as caught:
            yield caught
        assert state(self.pool) == before

    @contextmanager
    def taking(self, blocks: int, revived: int = 0, *, given_up: bool = False) -> Iterator[None]:
        """The body takes this many blocks from the queue, scratch blocks before cached ones, of which it may give
        up one before.
        """
        before, allocator = self.pool.counters(), self.pool.allocator
        scratch = allocator.num_free() - allocator.num_evictable()
        yield
        after = self.pool.counters()
        evicted, merged = max(0, blocks - scratch), after.merged_blocks - before.merged_blocks
        # A slot that kept tokens gives up blocks now that others have proved to hold: see PrefixSharing.catch_up.
        assert 0 <= after.blocks_allocated - before.blocks_allocated - blocks - revived <= merged
        assert 0 <= after.blocks_freed - before.blocks_freed <= merged
        gone = after.evicted_blocks - before.evicted_blocks
        assert gone == evicted or (given_up and gone == evicted - 1)
        assert (after.evictions > before.evictions) == (gone > 0)

    # Opening, copying and closing slots

    @rule(
        tokens=prompts,
        salt=salts,
        keep_free=st.integers(0, 3),
        resumed=st.booleans(),
        first_tokens=st.none() | st.integers(1, 9),
        all_fit=st.booleans(),
    )
    def allocate_slot(self, tokens: list[int], salt: Salt, **others: Any) -> None:
        self.open(tokens, salt, **others)

    @rule(length=lengths)
    def allocate_slot_of_unknown_tokens(self, length: int) -> None:
        self.open([next(self.unknown) for _ in range(length)], None, told=False)

    @precondition(lambda self: self.sharing and bool(indexed(self.pool)))
    @rule(pick=st.integers(0, 100), tail=st.lists(alphabet, max_size=3), resumed=st.booleans())
    def allocate_slot_of_known_prefix(self, pick: int, tail: list[int], resumed: bool) -> None:
        known = sorted(indexed(self.pool), key=repr)
        salt, tokens = known[pick % len(known)]
        self.open([*tokens, *tail], salt, resumed=resumed)

    def open(
        self,
        tokens: list[int],
        salt: Salt,
        *,
        told: bool = True,
        keep_free: int = 0,
        resumed: bool = False,
        swapped: int | None = None,
        first_tokens: int | None = None,
        all_fit: bool = True,
    ) -> int | None:
        """Open a slot; None if that was refused."""
        tokens = list(tokens)  # the pool keeps it
        arguments: dict[str, Any] = {"token_ids": tokens} if told else {"initial_tokens": len(tokens)}
        arguments |= {"salt": salt, "keep_free": keep_free, "resumed": resumed, "swapped": swapped}
        arguments |= {"first_tokens": first_tokens, "all_fit": all_fit}
        hits = self.hits(tokens, salt) if self.sharing and told else []
        references = self.references()
        revived = sum(not references[block] for block in hits)
        fits = len(tokens) <= self.pool.max_seq_len
        behind = self.tiered(tokens, salt, len(hits)) if self.sharing and told and fits else []
        tail = self.tail_of(swapped, len(hits), behind) if swapped is not None and fits else 0
        coming = [block for key in behind if (block := self.pool.offload.block_of(key)) is not None]
        found = min((len(hits) + len(behind)) * self.pool.block_size, max(len(tokens) - 1, 0))
        found += self.pool.block_size - 1 if self.parts else 0
        part = self.part(tokens, salt, len(hits)) if told and not behind else 0
        first = len(tokens) if first_tokens is None else min(len(tokens), found + first_tokens)
        blocks = max(self.blocks_for(first), len(hits) + len(behind))
        fresh, later = blocks - len(hits) - len(coming), self.blocks_for(len(tokens)) - blocks
        if len(tokens) > self.pool.max_seq_len:
            with self.refused(SlotError, match=f"{len(tokens)} tokens"):
                self.pool.allocate_slot(**arguments)
            return None
        left = max(0, self.free_blocks - keep_free)
        wanted = fresh + revived + (later if all_fit else 0)
        if wanted > self.free_blocks - keep_free:
            with self.refused(OutOfBlocksError) as caught:
                self.pool.allocate_slot(**arguments)
            assert (caught.value.wanted, caught.value.free) == (wanted, left)
            return None
        filling = {slot: self.pool.tables.blocks(slot) for slot in self.busy()}
        with self.taking(fresh, revived, given_up=part > 0):
            slot = self.pool.allocate_slot(**arguments)
        assert slot not in self.model
        assert self.pool.tables.blocks(slot)[: len(hits) + len(coming)] == hits + coming
        assert self.pool.is_loading(slot) == bool(behind)
        if behind:
            self.loading[slot] = len(hits), behind
            self.tails[slot] = tail
        content = Content(salt, tokens, told, blocks)
        content.stored = len(hits) * self.pool.block_size + part
        content.length = min(content.stored, max(len(tokens) - 1, 0))
        assert self.pool.get_seq_len(slot) == content.length
        pending = [entry for entry, block in enumerate(hits) if self.is_being_filled(block, entry)]
        for entry in pending:
            source = (s for s, table in filling.items() if self.fills(s, entry, table, hits[entry]))
            content.pending[entry] = next(source)
        self.model[slot] = content
        content.hits, content.same_step, content.resumed = len(hits), tuple(pending), resumed
        content.part, content.known = part, len(tokens)
        self.count_hits(content, 1)
        if not resumed:
            self.counts["prompt_tokens"] += len(tokens)
        return slot

    def count_hits(self, content: Content, sign: int) -> None:
        """Count what a sequence found, or take it back."""
        whole = content.hits * self.pool.block_size
        found = min(whole + content.part, max(content.known - 1, 0))  # the last token is computed in any case
        if content.resumed:
            self.counts["recompute_hit_tokens"] += sign * found
        else:
            same = len(content.same_step) * self.pool.block_size
            same -= found < whole and content.hits - 1 in content.same_step
            self.counts["hit_tokens"] += sign * found
            self.counts["same_step_hit_tokens"] += sign * same

    # Pins and time, of a pool that has any

    @precondition(lambda self: self.model and isinstance(self.pool.eviction, Retention))
    @rule(pick=picks, tokens=lengths)
    def pin_prefix(self, pick: int, tokens: int) -> None:
        slot = self.slot(pick)
        self.pool.pin_prefix(slot, tokens)
        self.pinning[slot] = tokens // self.pool.block_size

    @precondition(lambda self: isinstance(self.pool.eviction, Retention))
    @rule(seconds=st.integers(0, 4))
    def pass_time(self, seconds: int) -> None:
        """What is given up was cached, and for no longer than the rest."""
        retention, before = self.pool.eviction, self.pool.counters()
        assert isinstance(retention, Retention)
        self.now += seconds
        cached, pins = len(retention), retention.num_pinned
        changed = self.pool.expire(self.now)
        after = self.pool.counters()
        gone = after.expired_blocks - before.expired_blocks
        assert cached - len(retention) == gone
        assert changed == (gone > 0 or retention.num_pinned < pins)
        assert after.evicted_blocks == before.evicted_blocks
        limits = retention.limits
        for ages, longest in ((retention._ordinary, limits.ttl_s), (retention._kept, limits.pin_ttl_s)):
            assert list(ages.values()) == sorted(ages.values())
            assert longest is None or all(self.now - since < longest for since in ages.values())

    @precondition(lambda self: self.model)
    @rule(pick=picks, rerun=st.booleans(), told=st.booleans())
    def fork_slot(self, pick: int, rerun: bool, told: bool) -> None:
        """`told`: the copy has a list of its own, so that the pool knows its further tokens."""
        slot = self.slot(pick)
        if slot in self.loading:
            with self.refused(SlotError, match=f"slot {slot} is being loaded"):
                self.pool.fork_slot(slot, rerun_last=rerun)
            return
        if slot in self.busy():
            with self.refused(SlotError, match=f"slot {slot} is in a step"):
                self.pool.fork_slot(slot, rerun_last=rerun)
            return
        own = 0 if self.pool.is_paged() else 1
        source = self.model[slot]
        tokens = list(source.tokens)
        if own > self.free_blocks:
            with self.refused(OutOfBlocksError):
                self.pool.fork_slot(slot, tokens, rerun_last=rerun)
            return
        with self.taking(own):
            copy = self.pool.fork_slot(slot, tokens if told else None, rerun_last=rerun)
        assert copy not in self.model
        length = source.length - (1 if rerun and source.length else 0)
        self.model[copy] = replace(
            source,
            tokens=tokens,
            told=source.told and told,
            length=length,
            pending=dict(source.pending),
            hits=0,
            part=0,
            same_step=(),
        )
        same = self.pool.tables.blocks(slot) == self.pool.tables.blocks(copy)
        assert same == (self.pool.is_paged() or not source.blocks)

    def fills(self, slot: int, entry: int, table: list[int], block: int) -> bool:
        """Whether a slot of the coming step computes this block of its table, rather than sharing it itself."""
        return entry < len(table) and table[entry] == block and entry not in self.model[slot].pending

    def close(self, slot: int) -> None:
        """Close a slot; those that count on what it was about to compute have to compute it themselves."""
        alone = [block for block, held in self.references().items() if held == 1]
        released = len(set(alone) & set(self.pool.tables.blocks(slot)))
        before = self.pool.counters()
        retention = self.pool.eviction
        wanted = set(self.pinned_by(slot)) - (retention._pinned if isinstance(retention, Retention) else set())
        self.pool.free_slot(slot)
        self.check_pins(wanted, self.pool.counters().pins_refused - before.pins_refused)
        assert self.pool.counters().blocks_freed - before.blocks_freed == released
        assert self.pool.counters().blocks_allocated == before.blocks_allocated
        self.gone[slot] = self.model.pop(slot).stored
        self.guesses.pop(slot, None)
        self.loading.pop(slot, None)
        filled = slot in self.prepared
        self.prepared.pop(slot, None)
        if filled:
            self.rewind({slot})

    def pinned_by(self, slot: int) -> list[int]:
        """The blocks that are to be kept when a slot is closed: those of them that are computed and known."""
        sharing, count = self.pool._sharing, self.pinning.pop(slot, 0)
        if not isinstance(sharing, PrefixSharing):
            return []
        return self.pool.tables.blocks(slot)[: min(count, sharing._slots[slot].computed)]

    def check_pins(self, wanted: set[int], refused: int) -> None:
        """All of these are pinned, or none, and that is counted."""
        retention = self.pool.eviction
        if isinstance(retention, Retention) and wanted:
            assert refused in (0, 1)
            found = wanted & retention._pinned
            assert found == (set() if refused else wanted)
            assert retention.num_pinned <= retention.limits.pinned

    def rewind(self, slots: set[int]) -> None:
        """These slots leave the coming step without it: so do those that counted on them, and on those."""
        while slots:
            stored = {slot: self.model[slot].stored if slot in self.model else self.gone[slot] for slot in slots}
            slots = {s for s, content in self.model.items() if content.rewind(stored, self.pool.block_size)}
            for slot in slots:
                self.prepared.pop(slot, None)
                self.guesses.pop(slot, None)
                content = self.model[slot]
                self.count_hits(content, -1)  # it did not find what is behind its end now
                content.part *= content.length // self.pool.block_size >= content.hits
                content.hits = min(content.hits, content.length // self.pool.block_size)
                content.same_step = tuple(entry for entry in content.same_step if entry < content.hits)
                self.count_hits(content, 1)
