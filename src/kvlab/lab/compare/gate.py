"""The regression gate: conditions on a comparison that make the command fail.

A condition is decided by the medians, not by the interval. A gate has to answer every time: if it failed only
where the whole interval lies beyond the limit, a noisy machine, or a single run, would let every regression pass.
Where the interval leaves the answer open, the sentence says so, and that more repeats would settle it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from kvlab.errors import ConfigError
from kvlab.lab.compare.groups import Group
from kvlab.lab.compare.interval import Estimate

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([^\s<>=%,]+)\s*(<=|>=|<|>)\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """`metric operator limit`. With `relative` the limit is a change to the baseline, as a fraction."""

    text: str
    metric: str
    operator: str
    limit: float
    relative: bool

    def holds(self, value: float) -> bool:
        """Whether the value is beyond the limit."""
        return _COMPARE[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition found in a group, in a sentence."""

    violated: bool
    sentence: str


def parse_conditions(text: str) -> list[Condition]:
    """Read conditions separated by commas, such as `throughput/output_tokens_per_s < -5%` (a change to the
    baseline) or `latency/ttft_ms_p99 > 500` (a value). Raises ConfigError for anything else.
    """
    return [_parse(part) for part in text.split(",") if part.strip()]


def _parse(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            "fail_if",
            text.strip(),
            'is no condition; write "<metric> < -5%" for a change to the baseline or "<metric> > 500" for a value',
        )
    metric, sign, number, percent = match.groups()
    limit = float(number) / 100 if percent else float(number)
    return Condition(" ".join(text.split()), metric, sign, limit, bool(percent))


def check(
    condition: Condition, baseline: Group, other: Group, found: Estimate | None, reason: str | None = None
) -> Finding:
    """Apply a condition to a group. `found` is the group's estimate for the metric; None where it has none or, says
    `reason`, cannot be compared. What cannot be decided is violated: a gate must not pass what it has not seen.
    """
    values = other.values(condition.metric)
    if not values:
        why = "its runs did not measure it" if other.members else f"none of its runs finished ({other.endings})"
        return Finding(True, f"{condition.text}: {other.name} has no {condition.metric}: {why}")
    value = median(values)
    if not condition.relative:
        sentence = f"{condition.metric} of {other.name} is {value:,.6g}"
        violated = condition.holds(value)
        return Finding(violated, f"{sentence}, {'beyond' if violated else 'within'} the limit of {condition.text}")
    if reason is not None or found is None or found.delta is None:
        why = reason or f"{baseline.name} has no {condition.metric} to compare with, or 0"
        return Finding(True, f"{condition.text}: {other.name} cannot be compared with {baseline.name}: {why}")
    before = median(baseline.values(condition.metric))
    violated = condition.holds(found.delta)
    sentence = (
        f"{condition.metric} of {other.name} is {value:,.6g} against {before:,.6g} of {baseline.name}: "
        f"{100 * found.delta:+.1f} %, {'beyond' if violated else 'within'} the limit of {condition.text}"
    )
    return Finding(violated, sentence + _doubt(condition, found))


def _doubt(condition: Condition, found: Estimate) -> str:
    if found.low is None or found.high is None:
        return " (one run each: chance is not excluded)"
    if found.includes(condition.limit):
        return (
            f" (the interval, {100 * found.low:+.1f} to {100 * found.high:+.1f} %, has the limit within it: "
            "more repeats would settle it)"
        )
    return ""
