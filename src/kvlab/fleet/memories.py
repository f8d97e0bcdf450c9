"""What a router remembers of all replicas: which memory has which block."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from kvlab.kv.tiers.base import Key


class Memories:
    """Of each block the replicas' memories that have it, so that one walk over a prompt counts for all of them."""

    def __init__(self) -> None:
        self._holders = defaultdict[Key, set[Hashable]](set)
        self._counted: Sequence[Key] | None = None  # the prompt that was looked up last, unless one changed since
        self._counts = Counter[Hashable]()

    def add(self, memory: Hashable, key: Key) -> None:
        """A memory has a block."""
        self._holders[key].add(memory)
        self._counted = None

    def remove(self, memory: Hashable, key: Key) -> None:
        """A memory that had a block has forgotten it."""
        holders = self._holders[key]
        holders.remove(memory)
        if not holders:
            del self._holders[key]
        self._counted = None

    def count(self, memory: Hashable, keys: Sequence[Key]) -> int:
        """How many of a prompt's blocks a memory has, up to the first that none has."""
        if self._counted is not keys:
            self._counted, self._counts = keys, Counter()
            for key in keys:
                if key not in self._holders:
                    break
                self._counts.update(self._holders[key])
        return self._counts[memory]
