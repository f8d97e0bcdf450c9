"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvlab.kv.eviction.base import EVICTION_POLICIES, EvictionPolicy


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
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def victim(self) -> int:
        return self._order.popitem(last=False)[0]

    def victims(self, count: int) -> list[int]:
        take = self._order.popitem
        return [take(last=False)[0] for _ in range(count)]

    def blocks(self) -> Iterable[int]:
        return self._order
