"""Which metrics a report has rows for, and the text of their cells."""

import difflib
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from kvlab.errors import ConfigError
from kvlab.lab.compare.groups import Group
from kvlab.lab.compare.interval import Estimate
from kvlab.lab.results.catalogue import CATALOGUE, Metric


def choose_metrics(groups: Sequence[Group], wanted: Sequence[str]) -> list[str]:
    """The metrics to show: those `wanted` by name, by pattern (`latency/*`) or as `all`; by default those of a
    run's table that are not 0 or missing in every run. Raises ConfigError for one that no run has.
    """
    if not wanted:
        return [name for name, m in CATALOGUE.items() if m.in_table and any(any(g.values(name)) for g in groups)]
    return list(dict.fromkeys(name for wish in wanted for name in find_metrics("metrics", wish, groups)))


def find_metrics(key: str, wish: str, groups: Sequence[Group]) -> list[str]:
    """The metrics of these groups that a name, a pattern or `all` means, those of the catalogue first. Raises
    ConfigError, naming the setting `key`, where there are none.
    """
    known = {name for group in groups for run in group.runs for name in run.metrics}
    ordered = [name for name in CATALOGUE if name in known] + sorted(known - CATALOGUE.keys())
    names = [name for name in ordered if wish == "all" or fnmatchcase(name, wish)]
    if not names:
        near = sorted(ordered, key=lambda name: -difflib.SequenceMatcher(None, wish, name).ratio())
        raise ConfigError(key, wish, f"no run has this metric; there are: {', '.join(near)}")
    return names


def primary_metric(groups: Sequence[Group], wanted: Sequence[str]) -> str:
    """The one that the report's first sentences are about, which does not depend on the results: the first that was
    asked for; else output tokens per second, or, where arrivals set the pace, the latency of a whole request.
    """
    if wanted:
        return wanted[0]
    paced = any(run.config.get("workload.arrival", "burst") != "burst" for group in groups for run in group.runs)
    return "latency/e2el_ms_p50" if paced else "throughput/output_tokens_per_s"


def value_text(metric: Metric, value: float) -> str:
    """A metric's value; small ones that are no counts with enough digits to differ."""
    if metric.digits == 0 and metric.unit not in ("ms", "%"):
        return metric.text(value)
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return metric.text(value, digits=0 if abs(value) >= 1000 else max(metric.digits, digits))


def delta_text(change: Estimate, metric: Metric) -> str:
    """How much a group differs: in percent, or where the baseline is 0 in the metric's own unit."""
    if change.delta is None:
        return f"{change.difference:+,.{metric.digits}f}".replace("-", "\u2212")
    return f"{_percent(change.delta)} %"


def interval_text(change: Estimate) -> str:
    """The interval in percent; empty where there is none, `exact` where no repeat differs from another."""
    if change.low is None or change.high is None:
        return ""
    if math.isinf(change.low):
        return "in every run"
    return "exact" if change.low == change.high else f"{_percent(change.low)} to {_percent(change.high)} %"


def _percent(fraction: float) -> str:
    text = f"{100 * fraction:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "\u2212")
