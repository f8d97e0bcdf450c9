"""The search for the largest arrival rate at which requests are within their limits: which rates it tries."""

import re
from collections.abc import Generator
from dataclasses import dataclass

from kvlab.config import WorkloadConfig
from kvlab.errors import ConfigError

SPAN = 32.0  # times the rate that the workload has, up and down, where no bounds are given
_DIGITS = 4  # of a rate


@dataclass(frozen=True, slots=True)
class RateRange:
    """The setting that is the rate, where the search begins, and between which bounds it stays."""

    key: str  # workload.rate, of arrivals that are drawn; workload.rate_scale, of a trace's own
    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bracket:
    """What a search found: the largest rate that was tried and holds, and the smallest that does not. None: no rate
    within the bounds does.
    """

    holds: float | None = None
    fails: float | None = None


def rate_range(workload: WorkloadConfig, bounds: str | None = None) -> RateRange:
    """The range of a workload. `bounds` are the lowest and the highest rate, as 0.5-20. Raises ConfigError for one
    without an arrival rate.
    """
    if workload.concurrency is not None:
        text = "a closed loop has no arrival rate that could be found; leave it out"
        raise ConfigError("workload.concurrency", workload.concurrency, text)
    if workload.source == "jsonl":
        text = "the file says when its requests arrive; find=rate needs arrivals that have a rate"
        raise ConfigError("workload.source", workload.source, text)
    if workload.arrival == "burst":
        text = "all requests at once have no rate that could be found; set workload.arrival=poisson workload.rate=1"
        raise ConfigError("workload.arrival", workload.arrival, text)
    if workload.arrival == "trace":
        key, start = "workload.rate_scale", workload.rate_scale
    else:
        key, start = "workload.rate", workload.rate or 1.0
    if bounds is None:
        return RateRange(key, start, start / SPAN, start * SPAN)
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"{number}-{number}", bounds)
    low, high = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not 0 < low < high:
        raise ConfigError("rates", bounds, "write the lowest and the highest rate to try, as 0.5-20")
    return RateRange(key, min(max(start, low), high), low, high)


def bracket(asked: RateRange, precision: float) -> Generator[float, bool, Bracket]:
    """Yields the rates to try and is sent whether each holds: doubled or halved from the start on until one holds
    and another does not, then the geometric mean of these, until they are within `precision` percent.
    """
    holds: float | None = None
    fails: float | None = None
    rate = asked.start
    while True:
        if (yield rate):
            holds = rate
        else:
            fails = rate
        if holds is None:
            if rate <= asked.low:
                return Bracket(None, fails)
            rate = max(_rounded(rate / 2), asked.low)
        elif fails is None:
            if rate >= asked.high:
                return Bracket(holds, None)
            rate = min(_rounded(rate * 2), asked.high)
        else:
            rate = _rounded((holds * fails) ** 0.5)
            if fails <= holds * (1 + precision / 100) or not holds < rate < fails:
                return Bracket(holds, fails)


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
