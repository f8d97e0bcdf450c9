"""From traffic and today's settings to advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvlab.config import RunConfig
from kvlab.engine.threads import usable_cores
from kvlab.errors import ConfigError
from kvlab.lab.advise.advice import Advice, Figures, Plan, Proposal, command_of, how_sure
from kvlab.lab.advise.changes import Change, merged
from kvlab.lab.advise.goal import Goal
from kvlab.lab.advise.headroom import replayed, summary
from kvlab.lab.advise.search import Search, Tried
from kvlab.lab.advise.segments import Segment, alone, halves
from kvlab.lab.advise.settings import AdviseSettings
from kvlab.lab.advise.simulations import Outcome, Simulations, devices_of, served, simulate
from kvlab.lab.explain.replayed import observe
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.requests import requests_of
from kvlab.models.families import decoder_config
from kvlab.models.sparse import is_mixture

_CORES = 2  # that minutes= counts, on every machine, so that the same is simulated on all
_PLANNED = 60  # simulations of a part: single changes, changes together, the other half, layouts
_PROBE = 120  # requests that tell how much work one is
_SHOWN = 8  # changes that are simulated on the other part too
_TRIALS = 24  # combinations at most
_ALONE = 40  # requests served alone
_LEAST_SHARE = 0.005  # of the time, for a cause to be named

Told = Callable[[str, int, str], None]  # a stage, simulations so far, the best figure so far


class Adviser:
    """Advises on today's configuration, which `words` of a command line give. Simulations are kept in `file`.

    Raises a KvlabError for settings that cannot run, and for traffic that is too short.
    """

    def __init__(
        self,
        config: RunConfig,
        words: Sequence[str],
        settings: AdviseSettings,
        file: Path,
        told: Told = lambda *_: None,
    ) -> None:
        self.config, self.words, self.settings, self.told = _quiet(config), words, settings, told
        self.devices = _most_devices(config, settings)
        self.cores = usable_cores().logical
        self.requests = requests_of(self.config)
        self.first, self.second = self._segments()
        is_closed = config.workload.concurrency is not None
        self.goal = Goal.of(config, at_once=is_closed or not any(each.arrival_s for each in self.requests))
        self.simulations = Simulations(self.config, file, self.cores)
        self.simulations.on_end = self._ended
        self._stage, self._best, self._best_score = "", "", -math.inf

    def advise(self) -> Advice:
        """The advice."""
        config, goal, simulations = self.config, self.goal, self.simulations
        model = decoder_config(config.model, simulated=True)
        self._begin("today's settings")
        today = self._checked(simulations.one({}, self.first), self.first)
        self._begin("the ledger alone")
        blocks = int(today.metrics["capacity/blocks"]) * config.fleet.replicas
        ledger = replayed(config, self.requests, blocks, self.cores)
        facts = ledger.facts(config, self.requests, today)
        causes = _causes(config, self.first)
        room = ledger.headroom(today, simulate(config, {}, alone(self.first, _ALONE)), causes)
        search = Search(simulations, self.first, goal, facts, self.devices, self.settings.keep)
        self._begin("single changes")
        tried = search.singles()
        self._begin("changes together")
        left_s = self.settings.minutes * 60 * _CORES - simulations.work_s
        plan = search.plan(tried, max(0, min(_TRIALS, int(left_s / 2 / max(today.work_s, 1e-9)))))
        self._begin("the other part")
        proposals, planned = self._proposals(search, tried), self._plan(search, plan)
        self._begin("devices")
        frontier = tuple(map(self._figures, search.frontier(plan)))
        shown = {proposal.settings for proposal in proposals}
        verdicts = [(single.change.text, single.gain.verdict) for single in tried if single.gain]
        device = config.hardware and config.hardware.name
        return Advice(
            title=f"{config.model.name} on {today.devices} x {device}, {config.workload.name}",
            traffic=summary(config, self.requests),
            goal=goal,
            chosen_on=_of(self.first),
            reported_on=_of(self.second),
            today=self._figures(simulations.one({}, self.second)),
            today_command=command_of(self.words, {}, ""),
            headroom=room,
            proposals=proposals,
            no_difference=tuple(text for text, verdict in verdicts if verdict != "worse" and text not in shown),
            worse=tuple(text for text, verdict in verdicts if verdict == "worse" and text not in shown),
            not_tried=tuple((single.change.text, single.reason) for single in tried if not single.gain),
            plan=planned,
            frontier=frontier,
            sure=how_sure(config.framework.tables, is_sparse=is_mixture(model)),
            simulations=simulations.count,
            notes=self._notes(today),
        )

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
        work_s = self._checked(simulate(config, {}, probe), probe).work_s / len(probe.requests)
        most = int(self.settings.minutes * 60 * _CORES / _PLANNED / work_s)
        return halves(workload, self.requests, again, max(most, _PROBE))

    def _figures(self, outcome: Outcome) -> Figures:
        return Figures.of(outcome, self.goal, self.settings.price_per_hour)

    def _proposals(self, search: Search, tried: Sequence[Tried]) -> tuple[Proposal, ...]:
        """Changes that are better on both parts, and a layout that does the same with fewer devices."""
        goal, today = self.goal, search.today
        fewer = [
            single
            for single in tried
            if single.gain
            and single.outcome.devices < today.devices
            and (goal.holds(single.outcome) if goal.limits else single.gain.verdict == "no difference")
        ][:1]
        chosen = [single for single in tried if single.is_better][:_SHOWN] + fewer
        outcomes = self.simulations.run([single.change.settings for single in chosen], self.second)
        before, found = self.simulations.one({}, self.second), list[Proposal]()
        for single, outcome in zip(chosen, outcomes, strict=True):
            change = single.change
            if single.gain is None or outcome.error:
                continue
            command, again = command_of(self.words, change.settings, change.text), goal.gain(before, outcome)
            seen = single.gain, again, self._figures(outcome), change.cost, command
            proposal = Proposal(*seen, change.kind, change.text, change.price)
            if proposal.seen.verdict == "better" or (single in fewer and proposal.seen.verdict != "worse"):
                found.append(proposal)
        return tuple(found)

    def _plan(self, search: Search, plan: Mapping[str, Change]) -> Plan:
        """The plan as a whole on both parts; nothing where it is not better on the other too."""
        goal, settings = self.goal, merged(plan)
        before, outcome = self.simulations.run([{}, settings], self.second)
        if plan and (outcome.error or goal.gain(before, outcome).verdict != "better"):
            return self._plan(search, {})
        costs = dict.fromkeys(change.cost for change in plan.values() if change.cost != "nothing")
        texts = tuple(change.text for change in plan.values())
        return Plan(
            goal.gain(search.today, self.simulations.one(settings, self.first)),
            goal.gain(before, outcome),
            self._figures(outcome),
            "; ".join(costs) or "nothing",
            command_of(self.words, settings, " ".join(texts)),
            texts,
            goal.holds(outcome) if goal.limits else None,
        )

    def _notes(self, today: Outcome) -> tuple[str, ...]:
        """What a reader has to know of how this came about."""
        timing = plan_run(self.config, self.first.requests).timing
        notes = [f"steps timed by {today.timing}"]
        if timing is not None and timing.because:
            notes.append(timing.because)
        if self.first.seconds is not None and len(self.first.requests) < len(self.requests) // 3:
            text = (
                "caches are empty at the beginning of a window, so that hit rates are lower there than in a whole"
            )
            notes.append(f"{text} trace; minutes= widens it")
        if self.first is self.second:
            notes.append("all requests come at once: chosen and reported on the same ones")
        return tuple(notes)


def _quiet(config: RunConfig) -> RunConfig:
    if config.executor.kind != "simulated" or config.hardware is None:
        text = "advice is simulated; name a device, as hardware=h100_sxm, or hardware=here"
        raise ConfigError("hardware", None, text)
    return replace(config, figures=False, debug=replace(config.debug, audit=False, profile=False))


def _most_devices(config: RunConfig, settings: AdviseSettings) -> int:
    """Raises ConfigError where today's settings take more than allowed."""
    today, most = devices_of(config), settings.most_devices
    if most is not None and most < today:
        key = "budget_per_hour" if settings.devices is None or most < settings.devices else "devices"
        value = settings.budget_per_hour if key == "budget_per_hour" else settings.devices
        text = (
            f"allows {most} device{'s' * (most != 1)}, and today's settings take {today} (fleet.replicas="
            f"{config.fleet.replicas} executor.tensor_parallel={config.executor.tensor_parallel})"
        )
        raise ConfigError(key, value, text)
    return most or today


def _causes(config: RunConfig, segment: Segment) -> dict[str, float]:
    """What the time of requests went into, as shares, the largest first."""
    plan = plan_run(config, segment.requests)
    terms = observe(plan, served(plan).steps).terms_ms()
    whole = sum(terms.values())
    return {str(cause): ms / whole for cause, ms in terms.items() if whole and ms / whole >= _LEAST_SHARE}


def _of(segment: Segment) -> str:
    text = f"{segment.name}: {len(segment.requests):,} requests"
    if segment.seconds is not None:
        text += f", {segment.seconds[0]:,.0f} to {segment.seconds[1]:,.0f} s"
    return text
