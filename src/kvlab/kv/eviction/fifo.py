"""First in, first out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction
from kvlab.kv.prefix import Prefix


@EVICTION_POLICIES.register("fifo")
class FifoEviction(RankedEviction):
    """First in, first out: the oldest content, however often it was used since. O(log n)."""

    def __init__(self) -> None:
        super().__init__()
        self._filled: dict[int, int] = {}

    def rank(self, block: int) -> float:
        """When it got its content."""
        return self._filled[block]

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block in contents:
            self._filled[block] = self._tick()

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        for block in blocks:
            self._filled.pop(block, None)
