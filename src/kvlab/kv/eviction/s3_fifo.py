"""S3-FIFO (Yang et al., SOSP 2023)."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction, folded
from kvlab.kv.prefix import Prefix

_SMALL, _MAIN = 0, 1


@EVICTION_POLICIES.register("s3_fifo")
class S3FifoEviction(RankedEviction):
    """S3-FIFO (Yang et al., SOSP 2023): what comes once leaves soon, by a small queue before the main one.
    O(log n), amortised over hits.

    New content enters the small queue, content that left it not long ago the main one. The small queue gives the
    block while it holds a tenth of all content or more: its oldest, unless that was hit twice, when it goes to the
    main queue instead. The main queue gives its oldest; one with hits enters it anew with one hit less, of 3 at
    most. The ghost queue remembers what left the small queue: as many contents as the main queue holds.

    Both queues count referenced blocks, which hold their places but cannot go. Where no block of a queue can go,
    the other gives one. Noted of a content is its hash: those of two may, very rarely, be equal.
    """

    queues = 2
    spares = True

    def __init__(self) -> None:
        super().__init__()
        self._small: set[int] = set()
        self._ghost: OrderedDict[int, None] = OrderedDict()  # notes, the oldest first

    def queue(self, block: int) -> int:
        return _SMALL if block in self._small else _MAIN

    def turns(self) -> Sequence[int]:
        return (_SMALL, _MAIN) if 10 * len(self._small) >= len(self.notes) else (_MAIN, _SMALL)

    def spared(self, block: int) -> bool:
        """Whether it goes on to the main queue, or once more through it."""
        if block not in self._small:
            if not self.hits[block]:
                return False
            self.hits[block] = min(self.hits[block], 3) - 1
        elif self.hits[block] > 1:
            self._small.remove(block)
            del self.hits[block]
        else:
            return False
        self._births[block] = self._tick()
        return True

    def victim(self) -> int:
        block = super().victim()
        if block in self._small:
            self._ghost[self.notes[block]] = None
            while len(self._ghost) > max(len(self.notes) - len(self._small), 1):
                self._ghost.popitem(last=False)
        return block

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block, node in contents.items():
            self.notes[block] = key = folded(node, self.notes, _key)
            if key in self._ghost:
                del self._ghost[key]
            else:
                self._small.add(block)

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        self._small.difference_update(blocks)


def _key(before: int, node: Prefix) -> int:
    return hash((before, node.tokens))
