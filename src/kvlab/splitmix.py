"""SplitMix64 (Steele, Lea and Flood, 2014): its finaliser, which makes numbers without a state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = np.uint64(0x9E3779B97F4A7C15)  # between the numbers of its sequence


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits: flipping any bit of a word flips each bit of the result half of the time."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
