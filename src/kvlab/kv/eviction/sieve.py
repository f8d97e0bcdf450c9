"""SIEVE (Zhang et al., NSDI 2024)."""

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction


@EVICTION_POLICIES.register("sieve")
class SieveEviction(RankedEviction):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes round the blocks, oldest first; one that was hit since the hand
    last came by stays where it is, the first that was not goes. O(log n), amortised over hits.

    A block's place is when it was first unreferenced, so that the blocks of a sequence follow each other from its
    end to its beginning. The hand passes referenced blocks and parents; one of them that could go afterwards waits
    for its next round. The rank of a block is the round in which the hand comes to it.
    """

    spares = True

    def __init__(self) -> None:
        super().__init__()
        self._round = 0
        self._hand = 0  # the places before this one have been passed in this round

    def rank(self, block: int) -> float:
        """The round in which the hand comes to its place."""
        return self._round + (self._births[block] < self._hand)

    def spared(self, block: int) -> bool:
        """Whether it was hit since the last round, or was passed in this one while it could not go."""
        entered, birth, _ = self._evictable[block]
        if entered < self.rank(block):
            return True
        self._round, self._hand = int(entered), birth + 1
        return self.hits.pop(block, 0) > 0
