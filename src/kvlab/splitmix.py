"""SplitMix64 (Steele, Lea and Flood, 2014): its finaliser, and numbers that it makes without a state."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STEP = np.uint64(0x9E3779B97F4A7C15)  # between the numbers of its sequence
_WORD = 2**64 - 1


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits: flipping any bit of a word flips each bit of the result half of the time."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), `[rows]`, each a function of its row's seed, sample index and output position alone.

    A token drawn with it is therefore the same in any batch, at any chunk size, and when its step is run again.
    The three are hashed one after another with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = np.zeros(len(seeds), dtype=np.uint64)
    for words in (seeds, samples, positions):
        state = mix((state ^ np.array([word & _WORD for word in words], dtype=np.uint64)) + STEP)
    # 52 bits: the largest is then so far from 1 that no product with it rounds up to the other factor.
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
