"""The search for a plan: single changes, changes on top of the best, combinations, then what can be left out."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import optuna

from kvlab.config import RunConfig
from kvlab.errors import KvlabError
from kvlab.lab.advise.changes import Change, TrafficFacts, layouts_of, merged, possible_changes
from kvlab.lab.advise.goal import Gain, Goal
from kvlab.lab.advise.parts import changed
from kvlab.lab.advise.segments import Segment
from kvlab.lab.advise.simulations import Outcome, Simulations

_NEARLY = 0.9  # of the largest gain: among such changes the cheapest is taken
_KINDS = 5  # of single changes that are tried on top of the best
_ROUNDS = 4
_AT_ONCE = 2  # combinations that are simulated beside each other, on every machine
_ASKS = 8  # for each combination that is to be found: Optuna suggests what was good again

Plan = dict[str, Change]  # by kind


@dataclass(frozen=True, slots=True)
class Tried:
    """A change, its outcome, and what it gains over what was before."""

    change: Change
    outcome: Outcome
    gain: Gain | None  # None: these settings cannot run, or not be compared
    reason: str = ""  # why

    @property
    def verdict(self) -> str:
        """better, worse, no difference; empty: it is not known."""
        return self.gain.verdict if self.gain else ""


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
        return self._tried({}, self._possible(self.simulations.config))

    def plan(self, tried: Sequence[Tried], trials: int) -> Plan:
        """The changes that are best together; none where no change is better. Raises CapacityError."""
        better = [single.change for single in tried if single.verdict == "better"]
        if not better:
            return {}
        plan = {better[0].kind: better[0]}
        kinds = list(dict.fromkeys(change.kind for change in better))[:_KINDS]
        for _ in range(_ROUNDS):
            if self.goal.holds(self._outcome(plan)) or not self._extend(plan, kinds):
                break
        return self._pruned(self._combined(plan, tried, trials))

    def frontier(self, plan: Plan) -> Iterator[Outcome]:
        """For one, two, four ... devices up to the most: the layout that is best with the plan's other changes.
        None of groups, whose devices are not alike.
        """
        if self.simulations.config.fleet.groups:
            return
        others = {kind: change for kind, change in plan.items() if kind != "devices"}
        totals = {1 << power for power in range(11) if 1 << power <= self.devices} | {self.today.devices}
        for total in sorted(totals):
            layouts = layouts_of(self.simulations.config, total)
            plans = [others | {layout.kind: layout} for layout in layouts]
            outcomes = [found for found in self._outcomes(plans) if not self._unlike(self.today, found)]
            if outcomes:
                yield max(outcomes, key=self.goal.score)

    def _tried(self, plan: Plan, changes: Sequence[Change]) -> list[Tried]:
        """Each change on top of a plan."""
        before, found = self._outcome(plan), list[Tried]()
        outcomes = self._outcomes([plan | {change.kind: change} for change in changes])
        for change, outcome in zip(changes, outcomes, strict=True):
            reason = self._unlike(before, outcome)
            gain = None if reason else self.goal.gain(before, outcome)
            found.append(Tried(change, outcome, gain, reason))
        return ranked(found)

    def _unlike(self, before: Outcome, after: Outcome) -> str:
        """Why two outcomes cannot be compared; where times have two sources, the difference would be theirs."""
        if after.error or before.timing.partition(" ")[0] == after.timing.partition(" ")[0]:
            return after.error or ""
        return f"its steps would be timed by {after.timing}, today's are by {before.timing}: not comparable"

    def _possible(self, config: RunConfig) -> list[Change]:
        found = possible_changes(config, self.facts, self.devices)
        kept = tuple(f"{key}." for key in self.kept)
        return [change for change in found if not any(f"{key}.".startswith(kept) for key in change.keys)]

    def _outcome(self, plan: Plan) -> Outcome:
        return self._outcomes([plan])[0]

    def _outcomes(self, plans: Sequence[Plan]) -> list[Outcome]:
        return self.simulations.run([merged(plan.values()) for plan in plans], self.segment)

    def _extend(self, plan: Plan, kinds: Sequence[str]) -> bool:
        """Add the change that gains most on top of the plan; False where none does. Changes that make sense only
        now, as a router between replicas, are among them.
        """
        today = self.simulations.config
        try:
            config = changed(today, merged(plan.values()))
        except KvlabError:
            return False
        known = {change.kind for change in self._possible(today)}
        wanted = [change for change in self._possible(config) if change.kind in kinds or change.kind not in known]
        tried = self._tried(plan, [change for change in wanted if change.kind not in plan])
        better = [attempt.change for attempt in tried if attempt.verdict == "better"][:1]
        plan |= {change.kind: change for change in better}
        return bool(better)

    def _combined(self, plan: Plan, tried: Sequence[Tried], trials: int) -> Plan:
        """The best of so many combinations that Optuna suggests, for more of the goal and for fewer devices; the
        plan where none is better. Those that cannot run do not count, nor do those that are known: today's
        settings, single changes and the plan.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names: dict[str, dict[str, Change]] = {}  # by kind and text
        singles = [single for single in tried if single.verdict in ("better", "no difference")]
        for change in [*(single.change for single in singles), *plan.values()]:
            names.setdefault(change.kind, {})[change.text] = change
        best, best_outcome = plan, self._outcome(plan)
        known = {_texts({}): self.today, _texts(plan): best_outcome}
        known |= {frozenset((single.change.text,)): single.outcome for single in singles}
        left, space = trials, math.prod(1 + len(texts) for texts in names.values())
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=optuna.samplers.TPESampler(seed=0))
        study.enqueue_trial({kind: plan[kind].text if kind in plan else "" for kind in names})
        asked: list[tuple[optuna.Trial, Plan]] = []
        for _ in range(_ASKS * trials):
            if left <= 0 or len(known) >= space:
                break
            trial = study.ask()
            asked.append((trial, _asked(trial, names)))
            fresh = {_texts(suggested): suggested for _, suggested in asked}
            fresh = {texts: suggested for texts, suggested in fresh.items() if texts not in known}
            if fresh and len(fresh) < min(_AT_ONCE, left, space - len(known)):
                continue
            known |= zip(fresh, self._outcomes(list(fresh.values())), strict=True)
            left -= sum(not known[texts].error for texts in fresh)
            for trial, suggested in asked:
                outcome = known[_texts(suggested)]
                if self._unlike(self.today, outcome):
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                study.tell(trial, [self.goal.score(outcome), float(outcome.devices)])
                if self.goal.gain(best_outcome, outcome).verdict == "better":
                    best, best_outcome = suggested, outcome
            asked.clear()
        return best

    def _pruned(self, plan: Plan) -> Plan:
        """The plan without changes that gain nothing beside the others, the dearest first."""
        for kind in sorted(plan, key=lambda kind: -plan[kind].price):
            fewer = {other: change for other, change in plan.items() if other != kind}
            without = self._outcome(fewer)
            if fewer and not without.error and self.goal.gain(without, self._outcome(plan)).verdict != "better":
                plan = fewer
        return plan


def _texts(plan: Plan) -> frozenset[str]:
    return frozenset(change.text for change in plan.values())


def _asked(trial: optuna.Trial, names: Mapping[str, Mapping[str, Change]]) -> Plan:
    chosen = {kind: trial.suggest_categorical(kind, ["", *texts]) for kind, texts in names.items()}
    return {kind: names[kind][text] for kind, text in chosen.items() if text}


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """By gain; of those that gain nearly as much the cheapest first; behind them those of unknown gain."""
    left = [(single.gain.value, single) for single in tried if single.gain]
    left.sort(key=lambda pair: -pair[0])
    found: list[Tried] = []
    while left:
        most = left[0][0]
        near = [pair for pair in left if pair[0] >= _NEARLY * most] if most > 0 else left[:1]
        best = min(near, key=lambda pair: (pair[1].change.price, -pair[0]))
        left.remove(best)
        found.append(best[1])
    return found + [single for single in tried if not single.gain]
