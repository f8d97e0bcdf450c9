"""Least frequently used."""

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction


@EVICTION_POLICIES.register("lfu")
class LfuEviction(RankedEviction):
    """Least frequently used: the content with the fewest hits while resident, the oldest among equals. O(log n)."""

    def rank(self, block: int) -> float:
        return self.hits[block]
