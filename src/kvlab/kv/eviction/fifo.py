"""First in, first out."""

from collections.abc import Mapping

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction
from kvlab.kv.prefix import Prefix


@EVICTION_POLICIES.register("fifo")
class FifoEviction(RankedEviction):
    """First in, first out: the oldest content, however often it was used since. O(log n)."""

    def rank(self, block: int) -> float:
        """When it got its content."""
        return self.notes[block]

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block in contents:
            self.notes[block] = self._tick()
