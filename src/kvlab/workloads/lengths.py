"""Lengths in tokens, drawn as a setting says."""

import numpy as np

from kvlab.config import LengthConfig


def draw_length(generator: np.random.Generator, length: LengthConfig) -> int:
    """A length between the setting's bounds, both included."""
    if length.distribution == "lognormal" and length.median:
        return min(max(round(generator.lognormal(np.log(length.median), length.sigma)), length.min), length.max)
    return int(generator.integers(length.min, length.max, endpoint=True))
