"""How much a metric differs between two groups of repeats, and how sure that is.

Times and rates are compared as ratios, so everything is computed on logarithms: a machine that is 5 % slower in one
repeat multiplies what it measures. The interval is Student's for the mean of those logarithms, which with three to
ten repeats is what the data can carry: ranks cannot reach 95 % with three against three, and resampling three
numbers makes intervals that are too short.

- Repeats made in turns (repeat 1 of each configuration, then repeat 2, ...) are compared pair by pair: what the
  machine did in that turn is in both numbers and cancels (Fisher's blocks; a paired t-interval).
- Others are compared as two samples of unlike variance (Welch 1947).

For the method on computers: Georges, Buytaert, Eeckhout, "Statistically rigorous Java performance evaluation",
OOPSLA 2007; Kalibera, Jones, "Rigorous benchmarking in reasonable time", ISMM 2013. Ratios are averaged on
logarithms after Fleming, Wallace, "How not to lie with statistics", CACM 29(3), 1986.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

CONFIDENCE = 95.0  # %

_NO_SPREAD = 1e-12  # relative: what rounding leaves of equal numbers


class Method(StrEnum):
    """How an interval was found."""

    PAIRED = "paired"  # repeat by repeat
    WELCH = "welch"  # as two independent samples
    NONE = "none"  # one run each: no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """How a group differs from the baseline, relative to it: 0.05 is 5 % more.

    `delta` is the median of the ratios of paired repeats, or the ratio of the medians, less 1; [low, high] is the
    interval. Without an interval its ends are None. Where the baseline is 0 and the group is not, there is no
    `delta`, and the ends are infinite if every one of several runs is above 0.
    """

    difference: float  # between the medians, in the metric's unit
    delta: float | None
    low: float | None = None
    high: float | None = None
    method: Method = Method.NONE
    runs: tuple[int, int] = (1, 1)  # of baseline and group that were used

    def includes(self, limit: float) -> bool:
        """Whether the interval leaves open on which side of `limit` the difference is."""
        return self.low is not None and self.high is not None and self.low <= limit <= self.high


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
        baseline, other = [first for first, _ in pairs], [second for _, second in pairs]
    runs = (len(baseline), len(other))
    difference = median(other) - median(baseline)
    scale = sum(baseline) / len(baseline)
    if scale == 0:
        if any(other):
            if min(runs) < 2 or min(other) <= 0:
                return Estimate(difference, None, runs=runs)
            return Estimate(difference, None, math.inf, math.inf, Method.WELCH, runs)
        bound, method = (None, Method.NONE) if min(runs) < 2 else (0.0, Method.WELCH)
        return Estimate(difference, 0.0, bound, bound, method, runs)
    logs = min(*baseline, *other) > 0
    first = [math.log(value) if logs else value / abs(scale) for value in baseline]
    second = [math.log(value) if logs else value / abs(scale) for value in other]

    def relative(change: float) -> float:
        return math.expm1(change) if logs else change

    if paired:
        changes = [after - before for before, after in zip(first, second, strict=True)]
        low, high = _paired(changes, confidence)
        return Estimate(difference, relative(median(changes)), relative(low), relative(high), Method.PAIRED, runs)
    change = difference / median(baseline) if logs else median(second) - median(first)
    if min(runs) < 2:
        return Estimate(difference, change, runs=runs)
    low, high = _welch(first, second, confidence)
    return Estimate(difference, change, relative(low), relative(high), Method.WELCH, runs)


def _paired(changes: Sequence[float], confidence: float) -> tuple[float, float]:
    mean, variance = _moments(changes)
    return _interval(mean, variance / len(changes), len(changes) - 1, confidence)


def _welch(first: Sequence[float], second: Sequence[float], confidence: float) -> tuple[float, float]:
    (mean_1, variance_1), (mean_2, variance_2) = _moments(first), _moments(second)
    parts = variance_1 / len(first), variance_2 / len(second)
    squared = sum(parts)
    freedom = 1.0
    if squared > 0:
        shares = (part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
        freedom = squared**2 / sum(shares)
    return _interval(mean_2 - mean_1, squared, freedom, confidence)


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance; none where the values differ by rounding alone."""
    mean = sum(values) / len(values)
    if max(values) - min(values) <= _NO_SPREAD * max(1.0, abs(mean)):
        return mean, 0.0
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _interval(mean: float, squared_error: float, freedom: float, confidence: float) -> tuple[float, float]:
    if squared_error == 0:
        return mean, mean
    from scipy.stats import t  # here: it takes half a second to import

    half = float(t.ppf(0.5 + confidence / 200, freedom)) * math.sqrt(squared_error)
    return mean - half, mean + half
