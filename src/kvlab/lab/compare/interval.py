"""How much a metric differs between two groups of repeats, how sure that is, and the word for it.

Times and rates are compared as ratios, so everything is computed on logarithms: a machine that is 5 % slower in one
repeat multiplies what it measures. The interval is Student's for the mean of those logarithms, which suits three to
ten repeats: ranks cannot reach 95 % with three against three, and resampling three numbers makes intervals that are
too short.

- Repeats that ran in turns (repeat 1 of each configuration, then repeat 2, ...) are compared pair by pair: what the
  machine did in that turn is in both numbers and cancels (Fisher's blocks; a paired t-interval).
- Others are compared as two samples of unlike variance (Welch 1947).

For the method on computers: Georges, Buytaert, Eeckhout, "Statistically rigorous Java performance evaluation",
OOPSLA 2007; Kalibera, Jones, "Rigorous benchmarking in reasonable time", ISMM 2013. Ratios are averaged on
logarithms after Fleming, Wallace, "How not to lie with statistics", CACM 29(3), 1986.
"""

import math
import warnings
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from kvlab.lab.results.catalogue import direction

CONFIDENCE = 95.0  # %
MIN_EFFECT = 0.01  # a fraction
SAME = "same"

_NO_SPREAD = 1e-12  # relative: what rounding leaves of equal numbers


class Estimate(NamedTuple):
    """How a group differs from the baseline, relative to it: 0.05 is 5 % more.

    `delta` is the median of the ratios of paired repeats, or the ratio of the medians, less 1; [low, high] is the
    interval. Without an interval its ends are None. Where the baseline is 0 and the group is not, there is no
    `delta`, and the ends are infinite if every one of several runs is above 0.
    """

    difference: float  # between the medians, in the metric's unit
    delta: float | None
    low: float | None = None
    high: float | None = None
    paired: bool = False  # whether the interval is that of repeats in turn; else of two independent samples
    runs: tuple[int, int] = (1, 1)  # of baseline and group that were used


def estimate(
    baseline: Sequence[float],
    other: Sequence[float],
    *,
    pairs: Sequence[tuple[float, float]] = (),
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Compare a metric's values over repeats. Both groups have at least one value.

    `pairs` are (baseline, other) of repeats made in turn; fewer than two count as none. Values that are all
    positive are compared as ratios, others (counts that may be 0) as differences relative to the baseline's mean.
    """
    paired = len(pairs) >= 2
    if paired:
        baseline, other = zip(*pairs, strict=True)
    runs = (len(baseline), len(other))
    difference = median(other) - median(baseline)
    scale = fmean(baseline)
    if scale == 0:
        return _against_zero(other, difference, runs)
    logs = min(*baseline, *other) > 0
    first = [math.log(value) if logs else value / abs(scale) for value in baseline]
    second = [math.log(value) if logs else value / abs(scale) for value in other]
    relative = math.expm1 if logs else float
    change = median(second) - median(first)
    if paired:
        change = median(after - before for before, after in zip(first, second, strict=True))
    delta = difference / median(baseline) if logs and not paired else relative(change)
    if min(runs) < 2:
        return Estimate(difference, delta, runs=runs)
    low, high = map(relative, _interval(first, second, confidence, paired=paired))
    return Estimate(difference, delta, low, high, paired, runs)


def verdict(metric: str, change: Estimate, min_effect: float = MIN_EFFECT) -> str | None:
    """The word that the interval allows, such as faster, worse, higher or same; None where there is no interval.

    It is `same` unless the whole interval lies beyond `min_effect` on one side: then even the least difference that
    agrees with the repeats is one that matters. Without the margin, enough repeats would call any two runs
    different: something real and far too small to care about always is.
    """
    if change.low is None or change.high is None:
        return None
    words = direction(metric)
    if change.low > min_effect:
        return words.more
    return words.less if change.high < -min_effect else SAME


def is_worse(metric: str, word: str | None) -> bool:
    """Whether the word stands for a change for the worse."""
    words = direction(metric)
    return words.more_is_better is not None and word == (words.less if words.more_is_better else words.more)


def _against_zero(other: Sequence[float], difference: float, runs: tuple[int, int]) -> Estimate:
    """A baseline of zeros: no ratio to it exists."""
    delta, end = (None, math.inf) if any(other) else (0.0, 0.0)
    if min(runs) < 2 or (any(other) and min(other) <= 0):
        return Estimate(difference, delta, runs=runs)
    return Estimate(difference, delta, end, end, runs=runs)


def _interval(
    first: Sequence[float], second: Sequence[float], confidence: float, *, paired: bool
) -> tuple[float, float]:
    """Of the mean of second - first; a single value where nothing varies."""
    changes = [after - before for before, after in zip(first, second, strict=True)] if paired else []
    if not any(map(_varies, [changes] if paired else [first, second])):
        change = fmean(second) - fmean(first)
        return change, change
    from scipy import stats  # here: it takes half a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that one of the two groups does not vary
        test = stats.ttest_1samp(changes, 0) if paired else stats.ttest_ind(second, first, equal_var=False)
    low, high = test.confidence_interval(confidence / 100)
    return float(low), float(high)


def _varies(values: Sequence[float]) -> bool:
    return max(values) - min(values) > _NO_SPREAD * max(1.0, abs(fmean(values)))
