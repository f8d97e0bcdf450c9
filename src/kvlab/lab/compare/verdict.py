"""The word for a difference: faster, slower or same; better, worse; higher, lower."""

from __future__ import annotations

from kvlab.lab.catalogue import direction
from kvlab.lab.compare.interval import Estimate

SAME = "same"
MIN_EFFECT = 0.01


def verdict(metric: str, found: Estimate, min_effect: float = MIN_EFFECT) -> str | None:
    """The word that the interval allows; None where there is no interval.

    It is `same` unless the whole interval lies beyond `min_effect` on one side: then even the least difference that
    agrees with the repeats is one that matters. Without the margin, enough repeats would call any two runs
    different: something real and far too small to care about always is.
    """
    if found.low is None or found.high is None:
        return None
    words = direction(metric)
    if found.low > min_effect:
        return words.more
    if found.high < -min_effect:
        return words.less
    return SAME


def is_worse(metric: str, word: str | None) -> bool:
    """Whether the word tells of a change for the worse."""
    words = direction(metric)
    return words.more_is_better is not None and word == (words.less if words.more_is_better else words.more)
