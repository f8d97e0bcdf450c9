"""Advice: what today's settings give, the changes that were tried, a plan, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.lab.advise.changes import Change
from kvlab.lab.advise.goal import HOLDS, Gain, Goal
from kvlab.lab.advise.headroom import Headroom, TrafficSummary
from kvlab.lab.advise.simulations import Outcome
from kvlab.lab.results.tables import count
from kvlab.lab.settings import key_of, run_command

PLAN = "plan"  # the kind of several changes that are proposed together


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

    @property
    def priced(self) -> str:
        """Devices, and what they cost."""
        price = "" if self.per_million is None else f" at {self.per_million:,.2f} a million output tokens"
        return count(self.devices, "device") + price

    @property
    def latencies(self) -> str:
        """In words."""
        parts = ["ttft p50 {:,.0f} ms, p99 {:,.0f}".format(*self.ttft_ms)]
        if not math.isnan(self.tpot_ms[0]):
            parts.append("tpot p50 {:,.1f} ms, p99 {:,.1f}".format(*self.tpot_ms))
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change, or several that were tried together, and what they gain on either part of the traffic; none: change
    nothing.
    """

    kind: str  # of the change, or PLAN
    settings: tuple[str, ...]
    gain: Gain  # where they were chosen
    again: Gain  # on the other part
    figures: Figures  # there
    cost: str
    command: str

    @classmethod
    def of(
        cls, kind: str, changes: Sequence[Change], gain: Gain, again: Gain, figures: Figures, words: Sequence[str]
    ) -> Proposal:
        """Of changes to the settings that `words` of a command line give."""
        changed = {key for change in changes for key in change.settings}
        kept = [word for word in words if key_of(word) not in changed]
        texts = tuple(change.text for change in changes)
        costs = dict.fromkeys(change.cost for change in changes if change.cost != "nothing")
        command = run_command([*kept, *" ".join(texts).split()])
        return cls(kind, texts, gain, again, figures, "; ".join(costs) or "nothing", command)

    @property
    def text(self) -> str:
        """As settings of kvlab run."""
        return " ".join(self.settings) or "change nothing"

    @property
    def seen(self) -> Gain:
        """The gain on the other part, with an interval that has both."""
        return self.again.joined(self.gain)


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
    not_tried: tuple[tuple[str, str], ...]  # settings, and why
    plan: Proposal
    uneven: Proposal | None  # a plan that was better on both parts, with an error that is larger
    frontier: tuple[Figures, ...]
    sure: str
    simulations: int
    notes: tuple[str, ...]

    @property
    def first(self) -> str:
        """The part that changes are chosen on, in words; its headroom is told, and the frontier is of it."""
        return self.chosen_on.partition(":")[0]

    @property
    def second(self) -> str:
        """The part that figures of today's settings, of changes and of the plan are of, in words."""
        return self.reported_on.partition(":")[0]

    def sentences(self) -> list[str]:
        """The answer."""
        today, plan, uneven, room = self.today, self.plan, self.uneven, self.headroom
        if plan.settings:
            answer = f"Change {', '.join(plan.settings)}: {plan.figures.goal} there, on {plan.figures.priced} "
            answer += f"({plan.seen.text} {self.goal.unit})."
        else:
            tried = len(self.no_difference) + len(self.worse)
            answer = f"Change nothing: of {tried} changes none is better by more than its error."
        if uneven is not None:
            answer += f" {', '.join(uneven.settings)} gained on both parts, too unevenly to be sure: "
            answer += f"{uneven.figures.goal} ({uneven.seen.text})."
        is_near = uneven is not None and (uneven.figures.within or 0.0) >= HOLDS
        if plan.figures.within is not None and plan.figures.within < HOLDS and not is_near:
            answer += f" {unkept(plan, self.proposals, self.goal.limits)}"
        enough = [each for each in self.frontier if (each.within or 0.0) >= HOLDS]
        if enough and (least := min(enough, key=lambda each: each.devices)).devices < plan.figures.devices:
            answer += f" {least.priced} would keep the limits as well ({least.goal} on {self.first})."
        if self.traffic.unknown:
            found = f"what a prefix cache could find is {self.traffic.unknown.partition(':')[0]}"
        elif room.ceiling > 0.005:
            found = f"the prefix cache finds {100 * room.now:.1f} % of {100 * room.ceiling:.1f} % there are"
        else:
            found = "prompts have nothing in common that a cache could find"
        times = f"a request takes {room.mean_s:.3g} s, and {room.alone_s:.3g} s alone on these devices"
        now = f"Today, on {self.second}: {today.goal} on {today.priced} ({today.latencies})."
        if room.overload:
            now += f" On {self.first} {room.overload}."
        return [now, answer, f"Headroom, on {self.first}: {found}; {times}."]

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON, without what that does not have; the same for the same advice."""
        text = json.dumps({"answer": self.sentences(), **asdict(self)})
        found: dict[str, Any] = json.loads(
            text, parse_float=lambda number: round(float(number), 6), parse_constant=lambda _: None
        )
        rows = zip((self.plan, *self.proposals), (found["plan"], *found["proposals"]), strict=True)
        for proposal, values in rows:
            seen = proposal.seen
            values |= {"verdict": seen.verdict, "low": round(seen.low, 6), "high": round(seen.high, 6)}
        for values in found["proposals"]:
            values["settings"] = " ".join(values["settings"])
        return found


def unkept(plan: Proposal, proposals: Iterable[Proposal], limits: Iterable[str]) -> str:
    """Of a plan that does not keep the limits on the other part: a change that does, or limits that are kept."""
    for each in proposals:
        if (within := each.figures.within) is not None and within >= HOLDS:
            return f"{each.text} alone keeps the limits for 99 % (costs {each.cost}), the plan does not."
    levels = {"ttft": plan.figures.ttft_ms[1], "tpot": plan.figures.tpot_ms[1]}
    nearest = " and ".join(f"slo.{name}_ms={_up(levels[name])}" for name in limits)
    more = "kvlab tune find=replicas says how many devices keep them"
    return f"Nothing that was tried keeps the limits for 99 %; {nearest} would be kept, and {more}."


def _up(value: float) -> str:
    """A limit that is kept, of two digits."""
    if not math.isfinite(value) or value <= 0:
        return "?"
    unit = 10 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:g}"
