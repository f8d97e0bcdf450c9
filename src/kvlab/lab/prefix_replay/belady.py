"""The optimum: eviction by one who knows the future (Belady, 1966; Mattson et al., 1970)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import unpack

import numpy as np

from kvlab.kv.eviction import RankedEviction
from kvlab.kv.prefix import Prefix
from kvlab.lab.prefix_replay.traffic import NEVER, Visit


class BeladyEviction(RankedEviction):
    """Evicts the block whose next use is farthest. O(log n). For replays alone: `visit` tells it the future.

    No policy finds more. Who uses a block uses its parent too, so that the block used farthest from now is always
    one without a cached child: the contract costs this policy nothing, and what it keeps is found, without gaps.
    For whole blocks that each visit has to take at once, the exchange argument of paging holds as it stands.
    """

    def __init__(self, contents: int) -> None:
        super().__init__()
        self._next_uses = np.full(contents, NEVER)
        self._contents: dict[int, int] = {}  # the number of each block's content

    def visit(self, visit: Visit) -> None:
        """This visit is next: what it uses has been used when a block is let go."""
        self._next_uses[visit.contents] = visit.next_uses

    def rank(self, block: int) -> float:
        return -int(self._next_uses[self._contents[block]])

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block, node in contents.items():
            (self._contents[block],) = unpack("q", node.tokens)

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        for block in blocks:
            self._contents.pop(block, None)
