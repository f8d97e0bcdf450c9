"""A whole number for each of millions of contents."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.tiers.base import KEY_BYTES, Key

_PLACES = 1 << 10  # at first
_FULL = 0.75  # of the places


class ContentNumbers:
    """A hash table of two columns, 12 bytes a place. A Python object for each content takes 80, and its entry in a
    dict 40.

    64 of a key's 256 bits stand for it. Of ten million contents two are one in one of 370,000 runs.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(_PLACES, np.uint64)  # 0: no content is at the place
        self._used = 0  # places, or a few more: keys of one call that are equal, or meet at one place, count each
        self.numbers = np.zeros(_PLACES, np.int32)  # by place; 0 of a content that is new

    def places(self, keys: Sequence[Key]) -> NDArray[np.intp]:
        """Where in `numbers` each content is, until the next call, which may move them."""
        hashes = np.frombuffer(b"".join(keys), np.uint64)[:: KEY_BYTES // 8]
        if self._used + len(keys) > _FULL * len(self._hashes):
            self._make_room(len(keys))
        return self._placed(hashes)

    def _make_room(self, more: int) -> None:
        is_used = self._hashes != 0
        hashes, numbers = self._hashes[is_used], self.numbers[is_used]
        size = 2 * len(self._hashes)
        while len(hashes) + more > _FULL * size:
            size *= 2
        self._hashes, self.numbers = np.zeros(size, np.uint64), np.zeros(size, np.int32)
        self.numbers[self._placed(hashes)] = numbers
        self._used = len(hashes)

    def _placed(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        table, mask = self._hashes, len(self._hashes) - 1
        places = (hashes & np.uint64(mask)).astype(np.intp)
        left, at, step = np.arange(len(hashes)), places, 0
        while len(left):
            step += 1
            is_free = table[at] == 0
            if is_free.any():
                table[at[is_free]] = hashes[is_free]  # of several at one place, one stays
                self._used += int(np.count_nonzero(is_free))
            is_elsewhere = table[at] != hashes
            left, hashes = left[is_elsewhere], hashes[is_elsewhere]
            at = places[left] = (places[left] + step) & mask
        return places
