"""The regression gate: conditions on a comparison that make the command fail.

A condition is decided by the medians, not by the interval. A gate has to answer every time: if it failed only
where the whole interval lies beyond the limit, a noisy machine, or a single run, would let every regression pass.
Where the interval leaves the answer open, the sentence says so, and that more repeats would settle it.
"""

import operator
import re
from statistics import median
from typing import NamedTuple

from kvlab.errors import ConfigError
from kvlab.lab.compare.groups import Group
from kvlab.lab.compare.interval import Estimate

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*([^\s<>=%,]+)\s*(<=|>=|<|>)\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")


class Condition(NamedTuple):
    """`metric operator limit`. With `relative` the limit is a change to the baseline, as a fraction."""

    text: str
    metric: str
    operator: str
    limit: float
    relative: bool


class Finding(NamedTuple):
    """What a condition found in a group, in a sentence."""

    violated: bool
    sentence: str


def parse_conditions(text: str) -> list[Condition]:
    """Read conditions separated by commas, such as `throughput/output_tokens_per_s < -5%` (a change to the
    baseline) or `latency/ttft_ms_p99 > 500` (a value). Raises ConfigError for anything else.
    """
    conditions = []
    for part in filter(str.strip, text.split(",")):
        match = _CONDITION.fullmatch(part)
        if match is None:
            advice = 'write "<metric> < -5%" for a change to the baseline or "<metric> > 500" for a value'
            raise ConfigError("fail_if", part.strip(), f"is no condition; {advice}")
        metric, sign, number, percent = match.groups()
        limit = float(number) / 100 if percent else float(number)
        conditions.append(Condition(" ".join(part.split()), metric, sign, limit, bool(percent)))
    return conditions


def check(
    condition: Condition, baseline: Group, other: Group, change: Estimate | None, reason: str | None = None
) -> Finding:
    """Apply a condition to a group. `change` is the group's estimate for the metric; None where it has none or,
    as `reason` says, cannot be compared. What cannot be decided is violated: a gate must not pass what it has not
    seen.
    """
    values = other.values(condition.metric)
    if not values:
        why = "its runs did not measure it" if other.runs else f"none of its runs finished ({other.endings})"
        return Finding(True, f"{condition.text}: {other.name} has no {condition.metric}: {why}")
    value = median(values)
    sentence, decisive, doubt = f"{condition.metric} of {other.name} is {value:,.6g}", value, ""
    if condition.relative:
        if baseline is other:
            text = f"is a change to another group, and {other.name} is the only one; name runs of two"
            return Finding(True, f"{condition.text}: {text}")
        if reason is not None or change is None or change.delta is None:
            why = reason or f"{baseline.name} has no {condition.metric} to compare with, or 0"
            return Finding(True, f"{condition.text}: {other.name} cannot be compared with {baseline.name}: {why}")
        before, decisive = median(baseline.values(condition.metric)), change.delta
        sentence += f" against {before:,.6g} of {baseline.name}: {100 * change.delta:+.1f} %"
        if change.low is None or change.high is None:
            doubt = " (one run each: chance is not excluded)"
        elif change.low <= condition.limit <= change.high:
            interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f} %"
            doubt = f" (the interval, {interval}, has the limit within it: more repeats would settle it)"
    violated = _COMPARE[condition.operator](decisive, condition.limit)
    side = "beyond" if violated else "within"
    return Finding(violated, f"{sentence}, {side} the limit of {condition.text}{doubt}")
