"""Least recently used."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvlab.kv.eviction.base import EVICTION_POLICIES, EvictionPolicy
from kvlab.kv.prefix import Prefix


@EVICTION_POLICIES.register("lru")
class LruEviction(EvictionPolicy):
    """Least recently used: the block that has been unreferenced for longest. O(1), amortised.

    Children go first of themselves: who uses a block uses its parent too, and gives it up later.

    Blocks come and go by hundreds, as slices of one list. A block that is referenced again leaves its place in it,
    which is skipped when its turn comes: of a block's places the first are void, as many as `_void` says.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._begin = 0  # the places before are done with
        self._void: Counter[int] = Counter()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, block: int, parent: int | None = None) -> None:
        self.add_all([block], {})

    def add_all(self, blocks: Sequence[int], contents: Mapping[int, Prefix]) -> None:
        self._order += blocks
        self._length += len(blocks)

    def remove(self, block: int) -> None:
        self._void[block] += 1
        self._length -= 1
        if len(self._order) > 64 + 4 * self._length:
            self._order, self._begin = self.blocks(), 0
            self._void.clear()

    def victim(self) -> int:
        return self.victims(1)[0]

    def victims(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count:
            turn = self._order[self._begin : self._begin + count - len(victims)]
            self._begin += len(turn)
            victims += turn if self._void.keys().isdisjoint(turn) else self._valid(turn, self._void)
        self._length -= count
        if 2 * self._begin > 64 + len(self._order):
            del self._order[: self._begin]
            self._begin = 0
        return victims

    def blocks(self) -> list[int]:
        return self._valid(self._order[self._begin :], self._void.copy())

    @staticmethod
    def _valid(places: list[int], void: Counter[int]) -> list[int]:
        """The blocks of places that are not void; those that are do not count in `void` any more."""
        valid = []
        for block in places:
            if block not in void:
                valid.append(block)
            elif void[block] > 1:
                void[block] -= 1
            else:
                del void[block]
        return valid
