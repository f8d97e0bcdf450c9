"""Which metrics a report shows, and how it writes them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from kvlab.errors import ConfigError
from kvlab.lab.catalogue import CATALOGUE, Metric
from kvlab.lab.compare.groups import Group
from kvlab.lab.compare.interval import Estimate

_PRIMARY, _PACED = "throughput/output_tokens_per_s", "latency/e2el_ms_p50"


def choose_metrics(groups: Sequence[Group], wanted: Sequence[str]) -> list[str]:
    """The metrics to show. Without wishes those of a run's table that say something: not what no run has and not
    what is 0 in all. Wishes are names, patterns (`latency/*`) or `all`. Raises ConfigError for one that no run has.
    """
    if not wanted:
        return [name for name, m in CATALOGUE.items() if m.in_table and any(any(g.values(name)) for g in groups)]
    known = known_metrics(groups)
    chosen: list[str] = []
    for wish in wanted:
        found = [metric for metric in known if wish == "all" or fnmatchcase(metric, wish)]
        if not found:
            raise ConfigError(
                "metrics", wish, f"no run has this metric; there are: {', '.join(nearest(wish, known))}"
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def known_metrics(groups: Sequence[Group]) -> list[str]:
    """What some run has, in the order of the catalogue; last what is not in it."""
    found = {name for group in groups for run in group.runs for name in run.metrics}
    return [name for name in CATALOGUE if name in found] + sorted(found - CATALOGUE.keys())


def primary_metric(groups: Sequence[Group], wanted: Sequence[str]) -> str:
    """The one that the report's first sentences are about: chosen before anyone looks at the figures.

    It is the first that was asked for; else output tokens per second, or, where arrivals set the pace, the latency
    of a whole request.
    """
    if wanted:
        return wanted[0]
    paced = any(run.config.get("workload.arrival", "burst") != "burst" for group in groups for run in group.runs)
    return _PACED if paced else _PRIMARY


def check_metric(key: str, metric: str, groups: Sequence[Group]) -> None:
    """Raise ConfigError if no run has the metric."""
    known = known_metrics(groups)
    if metric not in known:
        raise ConfigError(key, metric, f"no run has this metric; there are: {', '.join(nearest(metric, known))}")


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """All of them, those most like `name` first."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())


def value_text(metric: Metric, value: float) -> str:
    """A metric's value; small ones that are no counts with as many digits as tell them apart."""
    if metric.digits == 0 and metric.unit not in ("ms", "%"):
        return metric.text(value)
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return metric.text(value, digits=0 if abs(value) >= 1000 else max(metric.digits, digits))


def percent(fraction: float, digits: int = 1) -> str:
    """A change, with its sign: +4.0 %."""
    text = f"{100 * fraction:+.{digits}f} %"
    return text.replace("-", "\u2212") if not re.fullmatch(r"[+-]0\.0* %", text) else text[1:]


def delta_text(found: Estimate, metric: Metric) -> str:
    """How much a group differs: in percent, or where the baseline is 0 in the metric's own unit."""
    if found.delta is None:
        return f"{found.difference:+,.{metric.digits}f}".replace("-", "\u2212")
    return percent(found.delta)


def interval_text(found: Estimate) -> str:
    """The interval in percent; empty where there is none, `exact` where no repeat differs from another."""
    if found.low is None or found.high is None:
        return ""
    if math.isinf(found.low):
        return "in every run"
    if found.low == found.high:
        return "exact"
    low, high = (percent(limit).removesuffix(" %") for limit in (found.low, found.high))
    return f"{low} to {high} %"
