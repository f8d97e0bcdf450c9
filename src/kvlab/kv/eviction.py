"""Which unreferenced block loses its content first."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

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

    def filled(self, blocks: Iterable[int]) -> None:
        """These referenced blocks have content from now on."""

    def used(self, blocks: Sequence[int]) -> None:
        """The content of these blocks was hit; they are referenced, so that they are not in the queue now."""

    def forget(self, blocks: Sequence[int]) -> None:
        """The content of these blocks is gone."""


EVICTION_POLICIES: Registry[type[EvictionPolicy]] = Registry("kv.eviction")


@EVICTION_POLICIES.register("lru")
class LruEviction(EvictionPolicy):
    """Least recently used: the block that has been unreferenced for longest. O(1).

    Children go first of themselves: who uses a block uses its parent too, and gives it up later.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, block: int, parent: int | None = None) -> None:
        """See EvictionPolicy."""
        self._order[block] = None

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        del self._order[block]

    def victim(self) -> int:
        """See EvictionPolicy."""
        return self._order.popitem(last=False)[0]

    def victims(self, count: int) -> list[int]:
        """See EvictionPolicy."""
        take = self._order.popitem
        return [take(last=False)[0] for _ in range(count)]

    def blocks(self) -> Iterable[int]:
        """See EvictionPolicy."""
        return self._order


class RankedEviction(EvictionPolicy):
    """Of the blocks without a child in the queue, the one of the lowest rank. O(log n).

    A heap has these leaves, and entries that are outdated, which `victim` skips. A parent enters it when its last
    child has left the queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []  # rank, age, block
        self._evictable: dict[int, tuple[int, int, int]] = {}
        self._parents: dict[int, int] = {}  # of blocks in the queue
        self._children: dict[int, int] = {}  # how many of them a parent has
        self._births: dict[int, int] = {}  # when each block's content was first unreferenced
        self._clock = 0

    def __len__(self) -> int:
        return len(self._evictable)

    @abstractmethod
    def rank(self, block: int) -> int:
        """A number; the lowest goes first, the oldest content among equals."""

    def add(self, block: int, parent: int | None = None) -> None:
        """See EvictionPolicy."""
        self._clock += 1
        entry = (self.rank(block), self._births.setdefault(block, self._clock), block)
        self._evictable[block] = entry
        if parent is not None:
            self._parents[block] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
        if block not in self._children:
            heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        self._take(block)
        if len(self._heap) > 64 + 4 * len(self._evictable):  # mostly outdated entries: start anew
            self._heap = [entry for block, entry in self._evictable.items() if block not in self._children]
            heapq.heapify(self._heap)

    def victim(self) -> int:
        """See EvictionPolicy."""
        while True:
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if self._evictable.get(block) is entry and block not in self._children:
                self._take(block)
                return block

    def _take(self, block: int) -> None:
        del self._evictable[block]
        parent = self._parents.pop(block, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._evictable:
                heapq.heappush(self._heap, self._evictable[parent])

    def blocks(self) -> Iterable[int]:
        """See EvictionPolicy."""
        return self._evictable

    def forget(self, blocks: Sequence[int]) -> None:
        """See EvictionPolicy."""
        for block in blocks:
            self._births.pop(block, None)


@EVICTION_POLICIES.register("fifo")
class FifoEviction(RankedEviction):
    """First in, first out: the oldest content, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._filled: dict[int, int] = {}

    def rank(self, block: int) -> int:
        """When it got its content."""
        return self._filled[block]

    def filled(self, blocks: Iterable[int]) -> None:
        """See EvictionPolicy."""
        for block in blocks:
            self._clock += 1
            self._filled[block] = self._clock

    def forget(self, blocks: Sequence[int]) -> None:
        """See EvictionPolicy."""
        super().forget(blocks)
        for block in blocks:
            self._filled.pop(block, None)


@EVICTION_POLICIES.register("lfu")
class LfuEviction(RankedEviction):
    """Least frequently used: the content with the fewest hits while resident, the oldest among equals."""

    def __init__(self) -> None:
        super().__init__()
        self._hits: dict[int, int] = {}

    def rank(self, block: int) -> int:
        """Hits so far."""
        return self._hits.get(block, 0)

    def used(self, blocks: Sequence[int]) -> None:
        """See EvictionPolicy."""
        for block in blocks:
            self._hits[block] = self._hits.get(block, 0) + 1

    def forget(self, blocks: Sequence[int]) -> None:
        """See EvictionPolicy."""
        super().forget(blocks)
        for block in blocks:
            self._hits.pop(block, None)
