"""From traffic and today's settings to advice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvlab.config import RunConfig
from kvlab.config.effects import without_effect
from kvlab.engine.threads import usable_cores
from kvlab.errors import ConfigError
from kvlab.lab.advise.advice import PLAN, Advice, Figures, Proposal
from kvlab.lab.advise.changes import Change, TrafficFacts, left_out, merged
from kvlab.lab.advise.goal import Goal, Kind
from kvlab.lab.advise.headroom import Headroom, replayed, summary
from kvlab.lab.advise.parts import devices_of, parts_of
from kvlab.lab.advise.search import Plan, Search, Tried
from kvlab.lab.advise.segments import Segment, alone, halves
from kvlab.lab.advise.settings import AdviseSettings
from kvlab.lab.advise.simulations import Outcome, Simulations, Spread, here, simulate
from kvlab.lab.explain.replayed import observe, quiet
from kvlab.lab.results.load import open_load
from kvlab.lab.results.tables import count
from kvlab.lab.run.plan import asked_note, plan_run
from kvlab.lab.run.remarks import remarks_on_devices
from kvlab.lab.run.requests import lengths_note, requests_of
from kvlab.lab.run.serve import simulated
from kvlab.lab.settings import run_command
from kvlab.models.families import decoder_config
from kvlab.models.sparse import is_mixture
from kvlab.simulation.accuracy import pair_errors, ratios

_CORES = 2  # that minutes= counts, on every machine, so that the same is simulated on all
_PLANNED = 60  # simulations of a part: single changes, changes together, the other half, layouts
_PROBE = 120  # requests that tell how much work one is
_SHOWN = 8  # changes that are simulated on the other part too
_TRIALS = 24  # combinations at most
_ALONE = 40  # requests served alone
_LEAST_SHARE = 0.005  # of the time, for a cause to be named
_EMPTY = (
    "caches are empty at the beginning of a window, so that hit rates are lower there than in a whole trace; "
    "minutes= widens it"
)

Told = Callable[[str, int, str], None]  # a stage, simulations so far, the best figure so far


class Adviser:
    """Advises on today's configuration, which `words` of a command line give. Simulations are kept in `file`.
    `noted` is what a reader has to know of the configuration.

    Raises a KvlabError for settings that cannot run, and for traffic that is too short.
    """

    def __init__(
        self,
        config: RunConfig,
        words: Sequence[str],
        settings: AdviseSettings,
        file: Path,
        told: Told = lambda *_: None,
        spread: Spread | None = None,
        noted: Sequence[str] = (),
    ) -> None:
        if config.executor.kind != "simulated" or config.hardware is None:
            text = "advice is simulated; name a device, as hardware=h100_sxm, or hardware=here"
            raise ConfigError("hardware", None, text)
        self.config, self.words, self.settings = quiet(config), words, settings
        self.told, self.noted = told, noted
        self.devices = _most_devices(config, settings)
        self.cores = usable_cores().logical
        self.requests = requests_of(self.config)
        self.first, self.second = self._segments()
        is_closed = config.workload.concurrency is not None
        self.goal = Goal.of(config, at_once=is_closed or not any(request.arrival_s for request in self.requests))
        self.simulations = Simulations(self.config, file, spread or here(self.cores), self._ended)
        self._stage, self._best, self._best_score = "", "", -math.inf

    def advise(self) -> Advice:
        """The advice."""
        config, simulations = self.config, self.simulations
        self._begin("today's settings")
        today = self._checked(simulations.one({}, self.first), self.first)
        self._begin("the ledger alone")
        room = self._headroom(today)
        facts = room.facts(config.kv.eviction, self.requests, today)
        self._begin("single changes")
        search, tried = self._singles(today, facts)
        self._begin("changes together")
        left_s = self.settings.minutes * 60 * _CORES - simulations.work_s
        plan = search.plan(tried, max(0, min(_TRIALS, int(left_s / 2 / max(today.work_s, 1e-9)))))
        self._begin("the other part")
        proposals, planned, uneven = self._proposals(tried, plan)
        self._begin("devices")
        changes = [*plan.values(), *(single.change for single in tried)]
        kept = {change.kind: change for change in changes if change.text in planned.settings}
        frontier = tuple(map(self._figures, search.frontier(kept)))
        shown = {proposal.text for proposal in proposals}
        others = [single for single in tried if single.gain and single.change.text not in shown]
        refused = [(single.change.text, single.reason) for single in tried if not single.gain]
        devices = f"{today.devices} x {config.hardware and config.hardware.name}"
        groups = " and ".join(f"{part.replicas} of {part.name}" for part in parts_of(config))
        return Advice(
            title=f"{config.model.name} on {groups or devices}, {config.workload.name}",
            traffic=summary(config.workload, self.requests),
            goal=self.goal,
            chosen_on=self.first.text,
            reported_on=self.second.text,
            today=self._figures(simulations.one({}, self.second)),
            today_command=run_command(self.words),
            headroom=room,
            proposals=tuple(proposals),
            no_difference=tuple(single.change.text for single in others if single.verdict != "worse"),
            worse=tuple(single.change.text for single in others if single.verdict == "worse"),
            not_tried=(*left_out(config, self.devices), *refused),
            plan=planned,
            uneven=uneven,
            frontier=frontier,
            sure=self._sure(),
            simulations=simulations.count,
            notes=self._notes(today),
        )

    def _singles(self, today: Outcome, facts: TrafficFacts) -> tuple[Search, list[Tried]]:
        """Every change alone. Where none is better and too few requests are within the limits to tell, their time
        is the goal from here on.
        """
        search = Search(self.simulations, self.first, self.goal, facts, self.devices, self.settings.keep)
        tried = search.singles()
        if not self.goal.is_far(today) or any(single.verdict == "better" for single in tried):
            return search, tried
        self.goal, self._best_score = replace(self.goal, kind=Kind.LATENCY), -math.inf
        return self._singles(today, facts)

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self.told(stage, self.simulations.count, self._best)

    def _ended(self, outcome: Outcome) -> None:
        if (score := self.goal.score(outcome)) > self._best_score:
            self._best, self._best_score = self.goal.figure(outcome), score
        self.told(self._stage, self.simulations.count, self._best)

    def _checked(self, today: Outcome, segment: Segment) -> Outcome:
        """Today's outcome. Raises a KvlabError where today's settings cannot run."""
        if today.error:
            plan_run(self.config, segment.requests)  # which raises it with its type
            raise ConfigError("settings", " ".join(self.words), today.error)
        return today

    def _segments(self) -> tuple[Segment, Segment]:
        """Two parts as large as the budget allows, by the work that a few requests are. Of a drawn workload the
        second is drawn with another seed.
        """
        config, workload, again = self.config, self.config.workload, None
        if workload.path is None and workload.source == "synthetic":
            again = requests_of(replace(config, seed=config.seed + 1))
        probe, _ = halves(workload, self.requests, again, _PROBE)
        timings = [str(group.plan.chosen["timing"]) for group in plan_run(config, probe.requests).groups]
        if len({timing.partition(" ")[0] for timing in timings}) > 1:
            text = f"would time steps of fleet.groups by {' and by '.join(timings)}, and gains would be their"
            raise ConfigError("executor.timing", config.executor.timing, f"{text} difference; name one for all")
        work_s = self._checked(simulate(config, {}, probe), probe).work_s / len(probe.requests)
        most = int(self.settings.minutes * 60 * _CORES / _PLANNED / work_s)
        return halves(workload, self.requests, again, max(most, _PROBE))

    def _headroom(self, today: Outcome) -> Headroom:
        """By the ledger, by what the time of requests goes into, and by how long they take alone."""
        config, plan = self.config, plan_run(self.config, self.first.requests)
        blocks = int(today.metrics["capacity/blocks"])
        log = simulated(plan)
        terms, load = observe(plan, log.steps).terms_ms(), open_load(config.workload, log)
        whole = sum(terms.values())
        return replace(
            replayed(config, self.requests, blocks, self.cores),
            now=today.metrics.get("kv/prefix_hit_rate", 0.0),
            mean_s=today.mean_s,
            alone_s=simulate(config, {}, alone(self.first, _ALONE)).mean_s,
            overload=None if load is None else load.overload,
            causes={str(cause): ms / whole for cause, ms in terms.items() if whole and ms / whole >= _LEAST_SHARE},
        )

    def _figures(self, outcome: Outcome) -> Figures:
        return Figures.of(outcome, self.goal, self.settings.price_per_hour)

    def _proposals(self, tried: Sequence[Tried], plan: Plan) -> tuple[list[Proposal], Proposal, Proposal | None]:
        """Changes that are better by more than their error, and a layout that does the same with fewer devices; the
        plan, which is the best of these, or nothing, where it is not so itself; and then a plan that was better on
        both parts, so unevenly that its error is larger.
        """
        better = [single.change for single in tried if single.verdict == "better"][:_SHOWN]
        fewer = [single.change for single in tried if self._saves(single)][:1]
        several = [(change.kind, [change]) for change in [*better, *fewer]] + [(PLAN, list(plan.values()))]
        settings = [merged(changes) for _, changes in [(PLAN, []), *several]]
        today, *outcomes = self.simulations.run(settings, self.first)
        later, *others = self.simulations.run(settings, self.second)

        def proposal(kind: str, changes: Sequence[Change], outcome: Outcome, other: Outcome) -> Proposal:
            gains = self.goal.gain(today, outcome), self.goal.gain(later, other)
            return Proposal.of(kind, changes, *gains, self._figures(other), self.words)

        *found, planned = [
            None if other.error else proposal(kind, changes, outcome, other)
            for (kind, changes), outcome, other in zip(several, outcomes, others, strict=True)
        ]
        kept = [tried for tried in found[: len(better)] if tried and tried.seen.verdict == "better"]
        uneven = None
        if planned is None or planned.seen.verdict != "better":
            uneven = planned if planned and planned.again.verdict == "better" else None
            planned = replace(kept[0], kind=PLAN) if kept else proposal(PLAN, [], today, later)
        kept += [tried for tried in found[len(better) :] if tried and tried.seen.verdict != "worse"]
        return kept, planned, uneven

    def _saves(self, single: Tried) -> bool:
        """Whether a change does the same with fewer devices."""
        if not single.gain or single.outcome.devices >= devices_of(self.config):
            return False
        return self.goal.holds(single.outcome) if self.goal.limits else single.verdict == "no difference"

    def _sure(self) -> str:
        """What the errors of predicted gains have been."""
        tables = self.config.framework.tables
        if not self.config.framework.cuda_graphs:
            return "no deployments without CUDA graphs were measured; errors are taken to be those with them"
        model = decoder_config(self.config.model, simulated=True)
        if states := model.states_called:
            return f"no deployments with {states} were measured; errors are taken to be those without it"
        is_sparse = is_mixture(model)
        if not (text := ratios(tables, is_sparse=is_sparse)):
            return f"no deployments of {tables} were measured; errors are taken to be the widest of others"
        direction = pair_errors(tables, is_sparse=is_sparse).direction
        return f"{text}, and of {100 * direction:.0f} % the right one was the faster"

    def _notes(self, today: Outcome) -> tuple[str, ...]:
        """What a reader has to know of how this came about."""
        plan = plan_run(self.config, self.first.requests)
        timing = plan.timing
        notes = [f"steps timed by {today.timing}"]
        if timing is not None and timing.because:
            notes.append(timing.because)
        if self.first.seconds is not None and len(self.first.requests) < len(self.requests) // 3:
            notes.append(_EMPTY)
        if self.goal.limits and self.goal.kind is Kind.LATENCY:
            notes.append("no change alone brings more requests within the limits: their mean time decides")
        if self.first is self.second:
            notes.append("all requests come at once: chosen and reported on the same ones")
        of_requests = lengths_note(self.config, self.requests), asked_note(plan)
        of_settings = list(without_effect(self.config))
        for part in plan.parts:
            if part.plan.timing is not None:
                of_settings += remarks_on_devices(part.plan, part.plan.timing)
        return (*notes, *filter(None, of_requests), *dict.fromkeys(of_settings), *self.noted)


def _most_devices(config: RunConfig, settings: AdviseSettings) -> int:
    """Raises ConfigError where today's settings take more than allowed."""
    today, most = devices_of(config), settings.most_devices
    if most is None or most >= today:
        return most or today
    key = "devices" if most == settings.devices else "budget_per_hour"
    layout = f"fleet.replicas={config.fleet.replicas} executor.tensor_parallel={config.executor.tensor_parallel}"
    if config.fleet.groups:
        layout = "fleet.groups"
    text = f"allows {count(most, 'device')}, and today's settings take {today} ({layout})"
    raise ConfigError(key, getattr(settings, key), text)
