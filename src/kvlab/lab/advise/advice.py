"""Advice: what today's settings give, the changes that were tried, a plan, and how sure that is."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.lab.advise.changes import Price
from kvlab.lab.advise.goal import HOLDS, Gain, Goal, Kind
from kvlab.lab.advise.headroom import Headroom, TrafficSummary
from kvlab.lab.advise.simulations import Outcome
from kvlab.simulation.accuracy import pair_errors, ratios


@dataclass(frozen=True, slots=True)
class Figures:
    """What settings give on one part of the traffic. Latencies in milliseconds."""

    goal: str  # the figure that is to become better, in words
    within: float | None  # share of requests within the limits
    ttft_ms: tuple[float, float]  # p50, p99
    tpot_ms: tuple[float, float]
    mean_s: float
    tokens_per_s: float
    goodput_per_s: float | None
    hit_rate: float | None
    devices: int
    per_million: float | None  # price of a million output tokens

    @classmethod
    def of(cls, outcome: Outcome, goal: Goal, price_per_hour: float | None) -> Figures:
        """The figures of an outcome."""
        rate, price = outcome.tokens_per_s, price_per_hour
        per_million = None if price is None or not rate else outcome.devices * price / 3600 / rate * 1e6
        return cls(
            goal.figure(outcome),
            goal.share_within(outcome) if goal.limits else None,
            (outcome.figure("ttft", 50), outcome.figure("ttft", 99)),
            (outcome.figure("tpot", 50), outcome.figure("tpot", 99)),
            outcome.mean_s,
            rate,
            outcome.metrics.get("slo/goodput_per_s"),
            outcome.metrics.get("kv/prefix_hit_rate"),
            outcome.devices,
            per_million,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What settings gain on either part of the traffic, and what they cost."""

    gain: Gain  # where they were chosen
    again: Gain  # on the other part
    figures: Figures  # there
    cost: str
    command: str

    @property
    def seen(self) -> Gain:
        """The gain on the other part, with an interval that has both."""
        return self.again.joined(self.gain)


@dataclass(frozen=True, slots=True)
class Proposal(Seen):
    """A single change, better or no different."""

    kind: str
    settings: str
    price: Price


@dataclass(frozen=True, slots=True)
class Plan(Seen):
    """Changes that were tried together; none: change nothing."""

    settings: tuple[str, ...]
    holds: bool | None  # whether the limits are kept; None: there are none


@dataclass(frozen=True, slots=True)
class Advice:
    """All of it. `chosen_on` and `reported_on` name the parts of the traffic."""

    title: str
    traffic: TrafficSummary
    goal: Goal
    chosen_on: str
    reported_on: str
    today: Figures
    today_command: str
    headroom: Headroom
    proposals: tuple[Proposal, ...]
    no_difference: tuple[str, ...]
    worse: tuple[str, ...]
    not_tried: tuple[tuple[str, str], ...]  # settings, and why they cannot run
    plan: Plan
    frontier: tuple[Figures, ...]
    sure: str
    simulations: int
    notes: tuple[str, ...]

    @property
    def first(self) -> str:
        """The settings of the first change, or that there is none."""
        return self.proposals[0].settings if self.proposals else "change nothing"

    def noted(self, note: str) -> Advice:
        """With one more thing to know."""
        return replace(self, notes=(*self.notes, note))

    def sentences(self) -> list[str]:
        """The answer."""
        today, plan, unit = self.today, self.plan, self.goal.unit
        now = f"Today: {today.goal} on {_priced(today)} ({_latencies(today)})."
        if not plan.settings:
            tried = len(self.no_difference) + len(self.worse)
            answer = f"Change nothing: of {tried} changes none is better by more than its error."
        else:
            answer = (
                f"Change {', '.join(plan.settings)}: {plan.figures.goal} on {_priced(plan.figures)} "
                f"({gain_text(plan.seen)} {unit})."
            )
        if plan.holds is False:
            answer += f" {_unkept(plan, self.proposals, self.goal.limits)}"
        return [now, answer, self._headroom()]

    def _headroom(self) -> str:
        room = self.headroom
        parts = []
        if self.traffic.unknown:
            parts.append(f"what a prefix cache could find is {self.traffic.unknown.split(':')[0]}")
        elif room.ceiling > 0.005:
            parts.append(f"the prefix cache finds {100 * room.now:.1f} % of {100 * room.ceiling:.1f} % there are")
        else:
            parts.append("prompts have nothing in common that a cache could find")
        parts.append(f"a request takes {room.mean_s:.3g} s, and {room.alone_s:.3g} s alone on these devices")
        return f"Headroom: {'; '.join(parts)}."

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON; the same for the same advice."""
        found = _plain(asdict(self))
        for proposal, values in zip(self.proposals, found["proposals"], strict=True):
            values["verdict"] = proposal.seen.verdict
        return {"answer": self.sentences(), **found}


def _unkept(plan: Plan, proposals: Sequence[Proposal], limits: Iterable[str]) -> str:
    """Of a plan that does not keep the limits on the other part: a change that does, or limits that are kept."""
    for proposal in proposals:
        if (within := proposal.figures.within) is not None and within >= HOLDS:
            return (
                f"{proposal.settings} alone keeps the limits for 99 % (costs {proposal.cost}), the plan does not."
            )
    levels = {"ttft": plan.figures.ttft_ms[1], "tpot": plan.figures.tpot_ms[1]}
    nearest = " and ".join(f"slo.{name}_ms={_up(levels[name])}" for name in limits)
    return f"Nothing that was tried keeps the limits for 99 %; {nearest} would be kept."


def gain_text(gain: Gain) -> str:
    """A gain and its interval."""
    digits = 0 if abs(gain.value) >= 10 else 1
    value, low, high = (f"{part:+.{digits}f}" for part in (gain.value, gain.low, gain.high))
    return f"{value}, {low} to {high}"


def command_of(words: Sequence[str], settings: Mapping[str, Any], text: str) -> str:
    """The run that tries it, as a user types it."""
    kept = [word for word in words if word.partition("=")[0].lstrip("+") not in settings]
    changes = [shlex.quote(part) for part in text.split()]
    return " ".join(["kvlab run", *map(shlex.quote, kept), *changes])


def how_sure(framework: str, *, is_sparse: bool) -> str:
    """What the errors of predicted gains have been."""
    if not (text := ratios(framework, is_sparse=is_sparse)):
        return f"no deployments of {framework} were measured; errors are taken to be the widest of others"
    direction = pair_errors(framework, is_sparse=is_sparse).direction
    return f"{text}, and of {100 * direction:.0f} % the right one was the faster"


def _priced(figures: Figures) -> str:
    devices = f"{figures.devices} device{'s' * (figures.devices != 1)}"
    price = figures.per_million
    return devices if price is None else f"{devices} at {price:,.2f} a million output tokens"


def _latencies(figures: Figures) -> str:
    parts = [f"ttft p50 {figures.ttft_ms[0]:,.0f} ms, p99 {figures.ttft_ms[1]:,.0f}"]
    if not math.isnan(figures.tpot_ms[0]):
        parts.append(f"tpot p50 {figures.tpot_ms[0]:,.1f} ms, p99 {figures.tpot_ms[1]:,.1f}")
    return "; ".join(parts)


def _up(value: float) -> str:
    """A limit that is kept, of two digits."""
    if not math.isfinite(value) or value <= 0:
        return "?"
    unit = 10 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:g}"


def _plain(value: Any) -> Any:
    """Without what JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value.value if isinstance(value, Kind) else int(value) if isinstance(value, Price) else value
