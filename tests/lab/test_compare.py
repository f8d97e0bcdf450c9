"""Intervals and verdicts: right on known numbers, and right often enough on simulated machines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy  # which imports its statistics when they are asked for

from kvlab.lab.compare.interval import Estimate, estimate, is_worse, verdict
from kvlab.lab.results.catalogue import direction
from tests.support.recorded import THROUGHPUT

LATENCY = "latency/ttft_ms_p50"
FIRST, SECOND = [100.0, 103.0, 97.0, 101.0], [90.0, 94.0, 88.0, 93.0]


def interval(found: Estimate) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def test_pairs_give_the_paired_interval_on_logarithms():
    found = estimate(FIRST, SECOND, pairs=list(zip(FIRST, SECOND, strict=True)))
    expected = scipy.stats.ttest_rel(np.log(SECOND), np.log(FIRST)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.expm1(expected.low), math.expm1(expected.high)))
    assert found.paired
    assert found.delta == pytest.approx(np.median(np.divide(SECOND, FIRST)) - 1, rel=0.01)
    low, high = interval(found)
    assert found.delta is not None
    assert low < found.delta < high


def test_without_pairs_the_interval_is_welchs():
    found = estimate(FIRST, SECOND[:3], confidence=99)
    result = scipy.stats.ttest_ind(np.log(SECOND[:3]), np.log(FIRST), equal_var=False)
    expected = result.confidence_interval(0.99)
    assert (found.low, found.high) == pytest.approx((math.expm1(expected.low), math.expm1(expected.high)))
    assert not found.paired
    assert found.delta == pytest.approx(np.median(SECOND[:3]) / np.median(FIRST) - 1)
    assert found.runs == (4, 3)


def test_one_run_has_a_delta_and_no_interval():
    found = estimate([100.0], [110.0, 111.0])
    assert found.delta == pytest.approx(0.105)
    assert (found.low, found.high, found.paired) == (None, None, False)
    assert verdict(THROUGHPUT, found) is None


def test_repeats_that_never_differ_are_exact():
    found = estimate([64.0] * 3, [48.0] * 3)
    assert found.low == found.high == pytest.approx(-0.25)
    assert verdict("kv/block_utilization_mean", found) == "lower"
    assert verdict("requests/preemptions", estimate([7.0, 7.0], [7.0, 7.0])) == "same"


def test_counts_that_are_zero_are_compared_as_differences():
    found = estimate([0.0, 2.0, 4.0], [8.0, 9.0, 10.0])
    expected = scipy.stats.ttest_ind([8, 9, 10], [0, 2, 4], equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low / 2, expected.high / 2))
    nothing = estimate([0.0, 0.0], [0.0, 0.0])
    assert (nothing.delta, nothing.low, nothing.high) == (0, 0, 0)
    grown = estimate([0.0, 0.0], [3.0, 5.0])
    assert (grown.delta, grown.difference) == (None, 4.0)
    assert verdict("requests/preemptions", grown) == "worse"
    for sometimes in (estimate([0.0, 0.0], [0.0, 5.0]), estimate([0.0], [3.0])):
        assert verdict("requests/preemptions", sometimes) is None


@pytest.mark.parametrize(
    ("metric", "factor", "word", "worse"),
    [
        (THROUGHPUT, 1.2, "faster", False),
        (THROUGHPUT, 0.8, "slower", True),
        (LATENCY, 1.2, "slower", True),
        (LATENCY, 0.8, "faster", False),
        ("duration_s", 0.8, "faster", False),
        ("capacity/peak_running", 1.2, "better", False),
        ("kv/internal_fragmentation_mean", 1.2, "worse", True),
        ("kv/blocks_allocated", 1.2, "higher", False),
        (THROUGHPUT, 1.0, "same", False),
        (THROUGHPUT, 1.005, "same", False),
    ],
)
def test_the_word_follows_the_direction_of_the_metric(metric, factor, word, worse):
    after = [value * factor for value in FIRST]
    found = verdict(metric, estimate(FIRST, after, pairs=list(zip(FIRST, after, strict=True))))
    assert (found, is_worse(metric, found)) == (word, worse)


def test_a_word_needs_the_whole_interval_beyond_the_margin():
    after = [108.0, 104.0, 105.5, 106.0]
    found = estimate(FIRST, after, pairs=list(zip(FIRST, after, strict=True)))
    assert 0 < interval(found)[0] < 0.05
    assert verdict(THROUGHPUT, found, min_effect=0.0) == "faster"
    assert verdict(THROUGHPUT, found, min_effect=0.05) == "same"


def test_metrics_have_a_direction_and_unknown_ones_are_neutral():
    assert direction("throughput/requests_per_s").more_is_better is True
    assert direction("engine/schedule_ms_p99").more_is_better is False
    assert direction("something/new").more_is_better is None


def _machine(generator: np.random.Generator, runs: int, noise: float, drift: float) -> np.ndarray:
    """The machine's slowness in each of a sequence of runs: a random walk, and chance in each run."""
    return np.exp(np.cumsum(generator.normal(0, drift, runs)) + generator.normal(0, noise, runs))


def _word_in_turns(generator, repeats, noise, drift, factor=1.0):
    """The word for two groups that ran in turns on a drifting machine, the second `factor` times as slow."""
    slow = _machine(generator, 2 * repeats, noise, drift)
    first, second = 100 / slow[0::2], 100 / factor / slow[1::2]
    return verdict(THROUGHPUT, estimate(list(first), list(second), pairs=list(zip(first, second, strict=True))))


@pytest.mark.parametrize("repeats", [3, 5, 10])
@pytest.mark.parametrize(("noise", "drift"), [(0.01, 0.0), (0.03, 0.02), (0.1, 0.05)])
def test_a_configuration_is_the_same_as_itself_nine_times_of_ten(repeats, noise, drift):
    generator = np.random.default_rng(repeats)
    words = [_word_in_turns(generator, repeats, noise, drift) for _ in range(300)]
    assert words.count("same") >= 270


def test_unpaired_repeats_are_the_same_nine_times_of_ten_too():
    generator = np.random.default_rng(0)
    words = [
        verdict(THROUGHPUT, estimate(*(list(100 / _machine(generator, 5, 0.03, 0.0)) for _ in range(2))))
        for _ in range(300)
    ]
    assert words.count("same") >= 270


@pytest.mark.parametrize(("repeats", "noise", "drift"), [(3, 0.02, 0.01), (5, 0.05, 0.02), (10, 0.1, 0.05)])
def test_a_slow_down_by_a_fifth_is_seen_nine_times_of_ten(repeats, noise, drift):
    generator = np.random.default_rng(repeats)
    words = [_word_in_turns(generator, repeats, noise, drift, factor=1.25) for _ in range(300)]
    assert words.count("slower") >= 270
    assert "faster" not in words


def test_pairs_see_through_a_drift_that_independent_samples_cannot():
    generator = np.random.default_rng(1)
    seen = {True: 0, False: 0}
    for _ in range(200):
        slow = np.exp(np.linspace(0, 0.4, 10)) * _machine(generator, 10, 0.01, 0.0)
        first, second = 100 / slow[0::2], 90 / slow[1::2]
        for paired in seen:
            pairs = list(zip(first, second, strict=True)) if paired else ()
            seen[paired] += verdict(THROUGHPUT, estimate(list(first), list(second), pairs=pairs)) == "slower"
    assert seen[True] == 200
    assert seen[False] < 20
