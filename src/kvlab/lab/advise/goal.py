"""What is better: service levels, latency or throughput; what a change gains, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvlab.config import RunConfig
from kvlab.lab.advise.simulations import Outcome
from kvlab.models.families import decoder_config
from kvlab.models.sparse import is_mixture
from kvlab.simulation.accuracy import PairErrors, pair_errors

HOLDS = 0.99  # share of requests within the limits
_FAR = 0.5  # share below which requests are so late that a change may help all and bring none within
# Of the bootstrap over blocks of consecutive requests: fewer blocks are longer than a request takes, and neighbours
# that are there together fare alike.
_BLOCKS, _DRAWS, _INTERVAL = 10, 400, (5, 95)
_BEYOND = 0.5  # of what two parts are apart: a third may lie so far beyond either (experiments/advice_halves)
_LEAST = 0.01  # a gain below is no difference, however sure


class Kind(StrEnum):
    """Which figure is to become better."""

    LEVELS = "requests within the limits"
    LATENCY = "mean time of a request"
    THROUGHPUT = "output tokens per second"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change gains: percentage points of requests within the limits, percent less time, or percent more
    tokens per second; with the interval in which nine of ten such gains are thought to lie.
    """

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """better, worse or no difference."""
        if self.low <= 0 <= self.high or abs(self.value) < 100 * _LEAST:
            return "no difference"
        return "better" if self.value > 0 else "worse"

    @property
    def text(self) -> str:
        """With its interval."""
        digits = 0 if abs(self.value) >= 10 else 1
        return "{}, {} to {}".format(*(f"{part:+.{digits}f}" for part in (self.value, self.low, self.high)))

    def joined(self, other: Gain) -> Gain:
        """Seen twice, on two parts of the traffic: an interval that has both, and is wider the more they differ."""
        beyond = _BEYOND * abs(self.value - other.value)
        return Gain(self.value, min(self.low, other.low) - beyond, max(self.high, other.high) + beyond)


@dataclass(frozen=True, slots=True)
class Goal:
    """The figure of a run, and how gains in it are told from errors."""

    kind: Kind
    limits: dict[str, float]  # ms, by ttft and tpot
    errors: PairErrors

    @classmethod
    def of(cls, config: RunConfig, *, at_once: bool) -> Goal:
        """The goal of a configuration. `at_once`: its requests wait for nothing, so that throughput counts."""
        is_sparse = is_mixture(decoder_config(config.model, simulated=True))
        limits, errors = config.slo.limits, pair_errors(config.framework.tables, is_sparse=is_sparse)
        kind = Kind.LEVELS if limits else Kind.THROUGHPUT if at_once else Kind.LATENCY
        return cls(kind, limits, errors)

    @property
    def unit(self) -> str:
        """Of a gain, in words."""
        return {
            Kind.LEVELS: "points of requests within the limits",
            Kind.LATENCY: "% of the mean time of a request",
            Kind.THROUGHPUT: "% more output tokens per second",
        }[self.kind]

    def share_within(self, outcome: Outcome, slower: float = 1.0) -> float:
        """Share of requests within the limits, if all took `slower` times as long."""
        within = self._within(outcome, slower)
        return float(within.mean()) if len(within) else 0.0

    def holds(self, outcome: Outcome) -> bool:
        """Whether the limits, if any, are kept."""
        return bool(self.limits) and not outcome.error and self.share_within(outcome) >= HOLDS

    def is_far(self, outcome: Outcome) -> bool:
        """Whether requests within the limits are too few to tell which change is better."""
        return self.kind is Kind.LEVELS and self.share_within(outcome) < _FAR

    def score(self, outcome: Outcome) -> float:
        """More is better. Of two that keep as many limits the faster one is better."""
        if outcome.error:
            return -np.inf
        if self.kind is Kind.THROUGHPUT:
            return outcome.tokens_per_s
        if self.kind is Kind.LATENCY:
            return -outcome.mean_s
        return self.share_within(outcome) - 1e-6 * outcome.mean_s

    def figure(self, outcome: Outcome) -> str:
        """The figure, in words."""
        within = f"{100 * self.share_within(outcome):.1f} % within"
        if self.kind is Kind.LEVELS:
            return within
        if self.kind is Kind.LATENCY:
            time = f"{outcome.mean_s:,.3g} s a request"
            return f"{within}, {time}" if self.limits else time
        return f"{outcome.tokens_per_s:,.0f} tokens/s"

    def gain(self, before: Outcome, after: Outcome) -> Gain:
        """What `after` gains. The interval has the variation over the traffic, by a bootstrap over blocks of
        consecutive requests of both, and what simulated ratios were off in half of the measured pairs.
        """
        error = self.errors.half
        if self.kind is Kind.THROUGHPUT:
            ratio = after.tokens_per_s / before.tokens_per_s if before.tokens_per_s else np.inf
            return Gain(*(100 * (ratio * factor - 1) for factor in (1, np.exp(-error), np.exp(error))))
        if self.kind is Kind.LEVELS:
            points = self._points(before, after)
            pair = np.stack([self._within(before), self._within(after)]).astype(float)
            low, high = _interval(points, [100 * (sums[1] - sums[0]) / count for sums, count in _resampled(pair)])
            moved = [self._points(before, after, np.exp(factor * error)) for factor in (-1, 1)]
            below, above = max(0.0, points - min(moved)), max(0.0, max(moved) - points)
            return Gain(points, points - np.hypot(points - low, below), points + np.hypot(high - points, above))
        pair = np.stack([before.latencies_ms["e2el"], after.latencies_ms["e2el"]])
        pair = pair[:, ~np.isnan(pair).any(axis=0)]
        ratio = float(np.log(pair[1].sum() / pair[0].sum())) if pair.size else 0.0
        low, high = _interval(ratio, [np.log(sums[1] / sums[0]) for sums, _ in _resampled(pair)])
        ends = ratio + np.hypot(high - ratio, error), ratio - np.hypot(ratio - low, error)
        return Gain(*(100 * (1 - np.exp(at)) for at in (ratio, *ends)))

    def _points(self, before: Outcome, after: Outcome, slower: float = 1.0) -> float:
        return 100 * (self.share_within(after, slower) - self.share_within(before, slower))

    def _within(self, outcome: Outcome, slower: float = 1.0) -> NDArray[np.bool_]:
        within = ~np.isnan(outcome.latencies_ms["e2el"])
        for name, most in self.limits.items():
            values = outcome.latencies_ms[name]
            missing = np.isnan(values) if name == "tpot" else False  # of one token
            within &= missing | (values * slower <= most)
        return within


def _interval(value: float, drawn: Sequence[float]) -> tuple[float, float]:
    """Of what was drawn; the value alone where nothing was."""
    low, high = np.percentile(drawn, _INTERVAL).tolist() if drawn else (value, value)
    return low, high


def _resampled(pair: NDArray[np.float64]) -> Iterator[tuple[NDArray[np.float64], int]]:
    """Sums of both rows, and how many columns they have, over blocks of columns that are drawn with replacement."""
    count = pair.shape[1]
    if not count:
        return
    edges = np.linspace(0, count, min(_BLOCKS, count) + 1).astype(int)
    sums, sizes = np.add.reduceat(pair, edges[:-1], axis=1), np.diff(edges)
    for row in np.random.default_rng(0).integers(0, len(sizes), (_DRAWS, len(sizes))):
        yield sums[:, row].sum(axis=1), int(sizes[row].sum())
