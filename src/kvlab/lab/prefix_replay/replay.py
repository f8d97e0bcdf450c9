"""Traffic through a pool without tensors, without an engine."""

from collections.abc import Iterator, Mapping, Sequence
from struct import unpack
from typing import NamedTuple

import numpy as np

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.eviction import EVICTION_POLICIES, EvictionPolicy, RankedEviction
from kvlab.kv.eviction.cost import CostEviction
from kvlab.kv.prefix import Prefix, PrefixIndex
from kvlab.lab.prefix_replay.traffic import NEVER, Traffic, Visit
from kvlab.lab.processes import in_processes

BELADY = "belady"
_BLOCK_BYTES = 1_000  # of a replay, for each block of its pool
_WORTH = 300_000  # blocks to be looked up and stored, below which processes take longer than they save


class BeladyEviction(RankedEviction):
    """Evicts the block whose next use is farthest. O(log n). For replays alone: `visit` tells it the future.

    No policy finds more. Who uses a block uses its parent too, so that the block used farthest from now is always
    one without a cached child: the contract costs this policy nothing, and what it keeps is found, without gaps.
    For whole blocks that each visit has to take at once, the exchange argument of paging holds as it stands.
    """

    def __init__(self, contents: int) -> None:
        super().__init__()
        self._next_uses = np.full(contents, NEVER)
        self._contents: dict[int, int] = {}  # the number of each block's content

    def visit(self, visit: Visit) -> None:
        """This visit is next: what it uses has been used when a block is let go."""
        self._next_uses[visit.contents] = visit.next_uses

    def rank(self, block: int) -> float:
        return -int(self._next_uses[self._contents[block]])

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block, node in contents.items():
            (self._contents[block],) = unpack("q", node.tokens)

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        for block in blocks:
            self._contents.pop(block, None)


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


class Task(NamedTuple):
    """One replay."""

    policy: str
    num_blocks: int


def replay_all(
    traffic: Traffic, tasks: Sequence[Task], concurrency: int, *, cores: int = 1, memory: int | None = None
) -> Iterator[tuple[Task, int]]:
    """The blocks that each replay finds, as they end, on so many cores and within so many bytes. For little work
    there are no processes. Raises CapacityError if one was killed.
    """
    processes = cores
    if memory is not None:
        processes = min(processes, memory // (_BLOCK_BYTES * max((task.num_blocks for task in tasks), default=1)))
    if sum(visit.blocks for visit in traffic.visits) * len(tasks) < _WORTH:
        processes = 1

    def work(task: Task) -> int:
        return replay(traffic, *task, concurrency)

    # The largest first, so that none is left for the end.
    ordered = sorted(tasks, key=lambda task: -task.num_blocks) if processes > 1 else tasks
    killed = "a process of the replay was killed, perhaps for memory: take fewer or smaller kv.num_blocks"
    yield from in_processes(work, ordered, processes, killed=killed)
