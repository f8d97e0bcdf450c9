"""Weighted by what computing a block again would cost."""

from collections.abc import Mapping

from kvlab.kv.eviction.base import EVICTION_POLICIES, RankedEviction, folded
from kvlab.kv.prefix import Prefix

_EQUAL = 32_768  # tokens of context: parameters / (2 x layers x width of attention)


@EVICTION_POLICIES.register("cost")
class CostEviction(RankedEviction):
    """GreedyDual-Size-Frequency (Cherkasova, 1998) over the cost of computing a block again. O(log n).

    The lowest rank goes first, `age + (1 + hits) * (1 + tokens up to the block's end / 32,768)`, taken when the
    block is let go. The last factor is the time of its prefill, in that of a block without context: the linear
    layers take the same for each block, attention takes as much again at 32,768 tokens in models of about 8
    billion parameters. `age` is the highest rank that was evicted so far, so that what is not used any more goes
    in time, however much it was hit or would cost. In a replay each number in a content stands for several
    tokens, `scale`. Noted are the tokens up to the end of a content.
    """

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self._equal = _EQUAL / scale
        self._age = 0.0

    def rank(self, block: int) -> float:
        return self._age + (1 + self.hits[block]) * (1 + self.notes[block] / self._equal)

    def spared(self, block: int) -> bool:
        self._age = max(self._age, self._evictable[block][0])
        return False

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block, node in contents.items():
            self.notes[block] = folded(node, self.notes, _end)


def _end(before: int, node: Prefix) -> int:
    return before + (len(node.tokens) // 8 if node.parent is not None else 0)  # a root has a salt for tokens
