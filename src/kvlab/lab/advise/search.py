"""The search for a plan: single changes, changes on top of the best, combinations, then what can be left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import optuna

from kvlab.config import RunConfig
from kvlab.config.groups import with_settings
from kvlab.errors import KvlabError
from kvlab.lab.advise.changes import Change, TrafficFacts, layouts_of, merged, possible_changes
from kvlab.lab.advise.goal import Gain, Goal
from kvlab.lab.advise.segments import Segment
from kvlab.lab.advise.simulations import Outcome, Simulations

_NEARLY = 0.9  # of the largest gain: among such changes the cheapest is taken
_KINDS = 5  # of single changes that are tried on top of the best
_ROUNDS = 4

Plan = dict[str, Change]  # by kind


@dataclass(frozen=True, slots=True)
class Tried:
    """A single change, its outcome, and what it gains over today."""

    change: Change
    outcome: Outcome
    gain: Gain | None  # None: these settings cannot run, or not be compared
    reason: str = ""  # why

    @property
    def is_better(self) -> bool:
        """Beyond its error."""
        return self.gain is not None and self.gain.verdict == "better"


class Search:
    """Searches on one segment. `devices`: most that a plan may take; `kept`: settings that stay as they are."""

    def __init__(
        self,
        simulations: Simulations,
        segment: Segment,
        goal: Goal,
        facts: TrafficFacts,
        devices: int,
        kept: Collection[str] = (),
    ) -> None:
        self.simulations, self.segment, self.goal, self.facts = simulations, segment, goal, facts
        self.devices, self.kept = devices, kept
        self.today = simulations.one({}, segment)

    def singles(self) -> list[Tried]:
        """Every change alone, the best first."""
        changes = self._possible(self.simulations.config)
        outcomes = self.simulations.run([change.settings for change in changes], self.segment)
        return self._tried(changes, outcomes, self.today)

    def plan(self, tried: Sequence[Tried], trials: int) -> Plan:
        """The changes that are best together; none where no change is better. Raises CapacityError."""
        better = [single for single in tried if single.is_better]
        if not better:
            return {}
        plan: Plan = {better[0].change.kind: better[0].change}
        kinds = list(dict.fromkeys(single.change.kind for single in better))[:_KINDS]
        for _ in range(_ROUNDS):
            if self.goal.holds(self._outcome(plan)) or not self._extend(plan, kinds):
                break
        return self._pruned(self._combined(plan, tried, trials))

    def frontier(self, plan: Plan) -> Iterator[Outcome]:
        """For one, two, four ... devices up to the most: the layout that is best with the plan's other changes."""
        others = merged({kind: change for kind, change in plan.items() if kind != "devices"})
        totals = {1 << power for power in range(11) if 1 << power <= self.devices} | {self.today.devices}
        for total in sorted(totals):
            settings = [others | dict(layout.settings) for layout in layouts_of(self.simulations.config, total)]
            outcomes = [
                found
                for found in self.simulations.run(settings, self.segment)
                if not (found.error or self._apart(self.today, found))
            ]
            if outcomes:
                yield max(outcomes, key=self.goal.score)

    def _tried(self, changes: Sequence[Change], outcomes: Sequence[Outcome], before: Outcome) -> list[Tried]:
        found = []
        for change, outcome in zip(changes, outcomes, strict=True):
            reason = outcome.error or self._apart(before, outcome)
            found.append(Tried(change, outcome, None if reason else self.goal.gain(before, outcome), reason or ""))
        return ranked(found)

    def _apart(self, before: Outcome, after: Outcome) -> str | None:
        """Why two outcomes cannot be compared: the difference would be that of two sources of times."""
        if before.timing.partition(" ")[0] == after.timing.partition(" ")[0]:
            return None
        return f"its steps would be timed by {after.timing}, today's are by {before.timing}: not comparable"

    def _possible(self, config: RunConfig) -> list[Change]:
        found = possible_changes(config, self.facts, self.devices)
        return [change for change in found if not change.settings.keys() & set(self.kept)]

    def _outcome(self, plan: Mapping[str, Change]) -> Outcome:
        return self.simulations.one(merged(plan), self.segment)

    def _extend(self, plan: Plan, kinds: Sequence[str]) -> bool:
        """Add the change that gains most on top of the plan; False where none does. Changes that make sense only
        now, as a router between replicas, are among them.
        """
        today = self.simulations.config
        try:
            config = with_settings(today, merged(plan))
        except KvlabError:
            return False
        known = {change.kind for change in self._possible(today)}
        found = [
            change
            for change in self._possible(config)
            if change.kind not in plan and (change.kind in kinds or change.kind not in known)
        ]
        outcomes = self.simulations.run([merged(plan | {change.kind: change}) for change in found], self.segment)
        best = next((each for each in self._tried(found, outcomes, self._outcome(plan)) if each.is_better), None)
        if best is not None:
            plan[best.change.kind] = best.change
        return best is not None

    def _combined(self, plan: Plan, tried: Sequence[Tried], trials: int) -> Plan:
        """The best of so many combinations that Optuna suggests, for more of the goal and for fewer devices; the
        plan where none is better.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names: dict[str, dict[str, Change]] = {}  # by kind and text
        changes = [single.change for single in tried if single.gain and single.gain.verdict != "worse"]
        for change in [*changes, *plan.values()]:
            names.setdefault(change.kind, {})[change.text] = change
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=optuna.samplers.TPESampler(seed=0))
        study.enqueue_trial({kind: plan[kind].text if kind in plan else "" for kind in names})
        best, best_outcome = plan, self._outcome(plan)
        for first in range(0, trials, 2):
            batch = [study.ask() for _ in range(min(2, trials - first))]
            plans = [_asked(trial, names) for trial in batch]
            outcomes = self.simulations.run([merged(suggested) for suggested in plans], self.segment)
            for trial, suggested, outcome in zip(batch, plans, outcomes, strict=True):
                if outcome.error or self._apart(self.today, outcome):
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                study.tell(trial, [self.goal.score(outcome), float(outcome.devices)])
                if self.goal.gain(best_outcome, outcome).verdict == "better":
                    best, best_outcome = suggested, outcome
        return best

    def _pruned(self, plan: Plan) -> Plan:
        """The plan without changes that gain nothing beside the others, the dearest first."""
        for kind in sorted(plan, key=lambda kind: -plan[kind].price):
            if len(plan) < 2:
                break
            fewer = {other: change for other, change in plan.items() if other != kind}
            without = self._outcome(fewer)
            if not without.error and self.goal.gain(without, self._outcome(plan)).verdict != "better":
                plan = fewer
        return plan


def _asked(trial: optuna.Trial, names: Mapping[str, Mapping[str, Change]]) -> Plan:
    chosen = {kind: trial.suggest_categorical(kind, ["", *texts]) for kind, texts in names.items()}
    return {kind: names[kind][text] for kind, text in chosen.items() if text}


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """By gain; of those that gain nearly as much the cheapest first."""
    left = sorted((single for single in tried if single.gain is not None), key=_by_gain)
    found: list[Tried] = []
    while left:
        most = -_by_gain(left[0])
        near = [single for single in left if -_by_gain(single) >= _NEARLY * most] if most > 0 else left[:1]
        best = min(near, key=lambda single: (single.change.price, _by_gain(single)))
        left.remove(best)
        found.append(best)
    return found + [single for single in tried if single.gain is None]


def _by_gain(single: Tried) -> float:
    return 0.0 if single.gain is None else -single.gain.value
