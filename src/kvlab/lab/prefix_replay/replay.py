"""Traffic through a pool without tensors, without an engine."""

from __future__ import annotations

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.eviction import EVICTION_POLICIES, EvictionPolicy
from kvlab.kv.eviction.cost import CostEviction
from kvlab.kv.prefix import Prefix, PrefixIndex
from kvlab.lab.prefix_replay.belady import BeladyEviction
from kvlab.lab.prefix_replay.traffic import Traffic, Visit

BELADY = "belady"


def replay(traffic: Traffic, policy: str, num_blocks: int, concurrency: int = 1) -> int:
    """The blocks of prompts that are found in a pool of `num_blocks`, which has room for the longest visit.

    Visits come one after the other. At most `concurrency` hold their blocks at once, fewer where they do not fit;
    the one that came first ends first, and a conversation's turn ends before its next.
    """
    run = _Replay(traffic, _eviction(traffic, policy), num_blocks)
    for visit in traffic.visits:
        run.serve(visit, concurrency)
    return run.found


def _eviction(traffic: Traffic, policy: str) -> EvictionPolicy:
    if policy == BELADY:
        return BeladyEviction(traffic.contents)
    chosen = EVICTION_POLICIES.get(policy)
    return chosen(traffic.block_size) if issubclass(chosen, CostEviction) else chosen()


class _Replay:
    """Allocator, index and eviction policy of a pool, over the numbers of contents in place of their tokens: they
    find, count and evict the same blocks, at a small part of the time.
    """

    def __init__(self, traffic: Traffic, eviction: EvictionPolicy, num_blocks: int) -> None:
        self.found = 0
        self._index = PrefixIndex(1)
        self._allocator = BlockAllocator(num_blocks, eviction, self._index.prune)
        self._eviction = eviction
        self._held: dict[Visit, list[int]] = {}  # blocks, by the visits that hold them, the first to come first

    def serve(self, visit: Visit, concurrency: int) -> None:
        """Look up a visit's blocks and store the others."""
        if visit.follows in self._held:
            self._end(visit.follows)
        while len(self._held) >= concurrency or not self._begin(visit):
            self._end(next(iter(self._held)))

    def _begin(self, visit: Visit) -> bool:
        """False, with nothing changed, where it does not fit beside the others."""
        allocator, index, contents = self._allocator, self._index, visit.contents.tolist()
        hits = index.match(contents[: visit.looked_up])
        unused = allocator.num_unreferenced(hits)
        if not allocator.can_allocate(visit.blocks - len(hits) + unused):
            return False
        self.found += len(hits)
        if isinstance(self._eviction, BeladyEviction):
            self._eviction.visit(visit)
        allocator.share(hits)
        allocator.touch(hits)
        fresh = allocator.allocate(visit.blocks - len(hits))
        new: dict[int, Prefix] = {}
        before = allocator.content(hits[-1]) if hits else None
        rest = contents[len(hits) :]
        index.extend(before or index.root(), rest, fresh[: len(rest)], new)
        allocator.set_contents(new)
        self._held[visit] = hits + fresh
        return True

    def _end(self, visit: Visit) -> None:
        self._allocator.free(self._held.pop(visit)[::-1])
