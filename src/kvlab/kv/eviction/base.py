"""What an eviction policy is, and the base of those that order blocks by a rank."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import ClassVar

from kvlab.errors import ConfigError, shown
from kvlab.kv.prefix import Prefix
from kvlab.registry import Registry


class EvictionPolicy(ABC):
    """The unreferenced blocks that hold content, in the order in which they are evicted.

    A referenced block is never in it. No block goes before one in it whose content continues its own (its child).
    `filled`, `used` and `forget` are called for any block with content, whether it is in it or not.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Blocks that could be evicted."""

    @abstractmethod
    def add(self, block: int, parent: int | None = None) -> None:
        """A block with content lost its last reference. `parent` is the block whose content it continues."""

    def add_all(self, blocks: Sequence[int], contents: Mapping[int, Prefix]) -> None:
        """Blocks with these contents lost their last references, in this order."""
        for block in blocks:
            parent = contents[block].parent
            self.add(block, None if parent is None else parent.block)

    @abstractmethod
    def remove(self, block: int) -> None:
        """A block in it is referenced again, or has lost its content."""

    @abstractmethod
    def victim(self) -> int:
        """Take out the block to evict now; there is at least one."""

    def victims(self, count: int) -> list[int]:
        """Take out the blocks to evict now, in order; there are as many."""
        return [self.victim() for _ in range(count)]

    @abstractmethod
    def blocks(self) -> Iterable[int]:
        """The blocks that could be evicted, in any order."""

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        """These referenced blocks have these contents from now on."""

    def used(self, blocks: Sequence[int]) -> None:
        """The content of these blocks was hit; they are referenced, so that they are not in the queue now."""

    def forget(self, blocks: Sequence[int]) -> None:
        """The content of these blocks is gone."""

    # What keeps blocks longer or shorter than their turn does more here: see Retention.

    quota_evictions = pinned_evictions = 0  # since the start

    @property
    def num_pinned(self) -> int:
        """Pinned blocks, in use or not."""
        return 0

    def kept(self) -> list[int]:
        """Pinned blocks that nobody references."""
        return []

    def pin(self, blocks: Sequence[int]) -> bool:
        """Pin these referenced blocks, a prefix from its first block on; False if they are too many."""
        return False

    def set_demand(self, salt: Hashable, blocks: int) -> None:
        """An allocation of so many blocks for this salt begins, in which they count as its own already; 0: it is
        done.
        """

    def expire(self, now: float) -> list[int]:
        """It is `now`, in seconds. Takes out the blocks whose time is over, in the order in which they go, and ends
        pins.
        """
        return []

    def next_expiry(self) -> float:
        """When `expire` next finds any, unless others go before; infinite: never."""
        return math.inf

    def broken(self) -> Iterable[tuple[str, str]]:
        """What does not agree: whose, and how. For the audit."""
        return ()


EVICTION_POLICIES: Registry[type[EvictionPolicy]] = Registry("kv.eviction", __package__)


def check_victims(
    policy: EvictionPolicy, blocks: object, count: int, contents: Mapping[int, Prefix], references: Sequence[int]
) -> None:
    """Raise ConfigError unless a policy may evict these blocks: `count`, with content and unreferenced."""
    distinct = set(blocks) if isinstance(blocks, Collection) and len(blocks) == count else set()
    if len(distinct) < count or not contents.keys() >= distinct or any(map(references.__getitem__, distinct)):
        text = f"evicts {shown(blocks)}; has to evict {count}, each a block that was added and not removed since"
        raise ConfigError("kv.eviction", type(policy).__name__, text)


class RankedEviction(EvictionPolicy):
    """Of the blocks without a child in the queue, the one of the lowest rank. O(log n).

    A heap has these leaves, and entries that are outdated, which `victim` skips. A parent enters it when its last
    child has left the queue. A policy may keep several such `queues`. Where one `spares` blocks, its heaps have the
    parents too, so that a parent loses its hits when its turn comes, as a leaf does; it just does not go.
    """

    queues: ClassVar[int] = 1
    spares: ClassVar[bool] = False

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()  # of each block's content, while it is resident
        self.notes: dict[int, int] = {}  # of each block's content, what a policy notes when it is filled
        self._heaps: list[list[tuple[float, int, int]]] = [[] for _ in range(self.queues)]
        self._evictable: dict[int, tuple[float, int, int]] = {}  # rank, age, block
        self._parents: dict[int, int] = {}  # of blocks in the queue
        self._children: dict[int, int] = {}  # how many of them a parent has
        self._births: dict[int, int] = {}  # when each block's content was first unreferenced
        self._clock = 0

    def __len__(self) -> int:
        return len(self._evictable)

    def rank(self, block: int) -> float:
        """A number; the lowest goes first, the oldest content among equals."""
        return 0

    def queue(self, block: int) -> int:
        """The number of the queue that a block is in, from 0 on."""
        return 0

    def turns(self) -> Sequence[int]:
        """The queues in the order in which they are to give a block now."""
        return (0,)

    def spared(self, block: int) -> bool:
        """Whether a block whose turn it is stays, to be ranked anew. It is not spared after finitely many turns."""
        return False

    def add(self, block: int, parent: int | None = None) -> None:
        self._births.setdefault(block, self._tick())
        if parent is not None:
            self._parents[block] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
        self._enter(block)

    def remove(self, block: int) -> None:
        self._take(block)
        if sum(map(len, self._heaps)) > 64 + 4 * len(self._evictable):  # mostly outdated entries: start anew
            self._heaps = [[] for _ in self._heaps]
            for member, entry in self._evictable.items():
                if self.spares or member not in self._children:
                    self._heaps[self.queue(member)].append(entry)
            for heap in self._heaps:
                heapq.heapify(heap)

    def victim(self) -> int:
        while True:
            block = next(lowest for queue in self.turns() if (lowest := self._lowest(queue)) is not None)
            if self.spared(block):
                self._enter(block)
            elif block in self._children:  # left out of the heaps until its last child has left the queue
                rank, birth, _ = self._evictable[block]
                self._evictable[block] = (rank, birth, block)
            else:
                self._take(block)
                return block

    def blocks(self) -> Iterable[int]:
        return self._evictable

    def used(self, blocks: Sequence[int]) -> None:
        self.hits.update(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            for column in (self._births, self.hits, self.notes):
                column.pop(block, None)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _enter(self, block: int) -> None:
        """Rank a block in the queue; an entry that it had is outdated."""
        self._evictable[block] = entry = (self.rank(block), self._births[block], block)
        if self.spares or block not in self._children:
            heapq.heappush(self._heaps[self.queue(block)], entry)

    def _lowest(self, queue: int) -> int | None:
        """The block of the lowest rank in a queue's heap; None: there is none."""
        heap = self._heaps[queue]
        while heap:
            entry = heap[0]
            block = entry[2]
            if self._evictable.get(block) is entry and (self.spares or block not in self._children):
                return block
            heapq.heappop(heap)
        return None

    def _take(self, block: int) -> None:
        del self._evictable[block]
        parent = self._parents.pop(block, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._evictable:
                heapq.heappush(self._heaps[self.queue(parent)], self._evictable[parent])


def folded(node: Prefix, known: Mapping[int, int], step: Callable[[int, Prefix], int]) -> int:
    """A number that follows from a content and all before it, such as its length: `step` of the parent's and the
    node, 0 before the root. It is `known` of most parents' blocks, so that one call costs O(1).
    """
    path = [node]
    while (parent := path[-1].parent) is not None and parent.block not in known:
        path.append(parent)
    value = 0 if parent is None or parent.block is None else known[parent.block]
    for content in reversed(path):
        value = step(value, content)
    return value
