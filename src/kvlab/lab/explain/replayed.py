"""A recorded run once more, step by step, with what made each request wait."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvlab.config import RunConfig
from kvlab.core import RequestRecord, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.batching import StepBatch
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd
from kvlab.engine.protocol import ServingEngine, StepObserver
from kvlab.errors import ConfigError
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.transfer import Transfer
from kvlab.lab.explain.hops import Hops, hops_of, joined_life, prompt_of
from kvlab.lab.explain.life_observer import DecodeTimes, LifeObserver
from kvlab.lab.explain.lives import Cause, Interval, Life
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.records import RunRecord
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.run.playback import Playback
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.prompt_tokens import PromptObserver, PromptTokens, Reason
from kvlab.lab.run.serve import make_engine

T = TypeVar("T")
_MOST_APART = 1e-6  # seconds: a replay is the run, unless an end differs by more


@dataclass(frozen=True, slots=True)
class Explanation:
    """A run's requests: each one's record, life, and what became of its prompt, by request and sample; of a fleet
    also where each was sent.
    """

    plan: RunPlan
    records: dict[SampleKey, RequestRecord]
    lives: dict[SampleKey, Life]
    prompts: dict[SampleKey, PromptTokens]
    hops: Hops  # of a fleet, what its router chose for each request
    pulls: Mapping[str, Sequence[Transfer]]  # what each pulled from neighbours

    @property
    def is_simulated(self) -> bool:
        """Whether its steps can be timed anew."""
        return self.plan.timing is not None

    def terms_ms(self, keys: Collection[SampleKey] | None = None) -> dict[Cause, float]:
        """Milliseconds of all requests by cause, or of some, the longest first."""
        terms: Counter[Cause] = Counter()
        for key in self.lives:
            if keys is None or key in keys:
                terms.update(self.terms_of(key))
        return dict(terms.most_common())

    def latency_ms(self, key: SampleKey) -> float:
        """Milliseconds from arrival to end."""
        return self.records[key].e2el_ms or 0.0

    def first_token_ms(self, key: SampleKey) -> float | None:
        """Milliseconds from arrival to the first token; None: there was none."""
        return self.records[key].ttft_ms

    def intervals_of(self, key: SampleKey) -> list[Interval]:
        """What one's time went into, from its arrival on."""
        return self.lives[key].intervals

    def terms_of(self, key: SampleKey, until_s: float | None = None) -> dict[Cause, float]:
        """Milliseconds of one by cause, the longest first, which sum to its latency; up to its first token at
        `until_s`, where that is given, to the time to that.
        """
        return self.lives[key].terms_ms(math.inf if until_s is None else until_s)

    def prompt_tokens(self) -> dict[Reason, int]:
        """Tokens of all prompts by what became of them, the most first."""
        tokens: Counter[Reason] = Counter()
        for prompt in self.prompts.values():
            tokens.update(prompt.tokens)
        return dict(tokens.most_common())

    def slowest(self, count: int) -> list[SampleKey]:
        """The requests that took longest from arrival to end."""
        return sorted(self.lives, key=lambda key: -self.latency_ms(key))[:count]


class _Observers:
    """Several observers as one."""

    every_step = True

    def __init__(self, *observers: StepObserver) -> None:
        self._observers = observers

    def added(self, first: Any) -> None:
        for observer in self._observers:
            observer.added(first)

    def stepped(self, record: StepRecord, batch: StepBatch) -> None:
        for observer in self._observers:
            observer.stepped(record, batch)


def explain_run(
    run: RunRecord,
    config: RunConfig,
    detail: Collection[str] = (),
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> Explanation:
    """Serve a recorded run's requests again, and find out what each waited for. Of the requests of `detail` it is
    kept who held the blocks that they waited for. `on_step` is given steps done, and all.

    Raises ConfigError for a run of which no steps are known, and where the replay comes to other times.
    """
    steps = run.steps()
    if not steps or "kv_bytes_per_token" not in run.facts:
        raise ConfigError("run", run.directory, "has no steps of kvlab's own engine")
    if config.fleet.replicas > 1 and not run.simulated:
        text = f"was computed here by {config.fleet.replicas} replicas; only simulated ones are explained together"
        raise ConfigError("run", run.directory, text)
    if not run.finished:
        raise ConfigError("run", run.directory, f"was {run.status}; only a run that ended can be explained")
    plan = plan_run(quiet(config) if run.simulated else _played_back(config, run.directory))
    seen = observe(plan, steps, detail, lambda done: on_step(done, len(steps)))
    for record in run.requests():
        again = seen.records.get(record.key)
        if again is None or abs(again.finished_s - record.finished_s) > _MOST_APART:
            raise ConfigError(
                "run",
                run.directory,
                f"is not what its settings give here: {record.name} ends at another time; another version of kvlab "
                "made it, or the file of its workload has changed. Run it again",
            )
    return seen


def observe(
    plan: RunPlan, steps: StepLog, detail: Collection[str] = (), on_step: Callable[[int], None] = lambda done: None
) -> Explanation:
    """Serve the plan's requests step by step. `steps`: of the same run, which say what decoding alone takes."""
    has_salts = any(request.salt is not None for request in plan.requests)
    chosen = plan.config.fleet
    has_tiers = chosen.store is not None or plan.config.kv.offload is not None
    loading = Cause.TRANSFER if chosen.prefill or (chosen.neighbours and not has_tiers) else Cause.TIER
    with served_from(plan) as (engine, cores):
        fleet = engine if isinstance(engine, Fleet) else None
        parts = [engine] if fleet is None else [replica.engine for replica in fleet.replicas]
        lives, prompts = list[LifeObserver](), list[PromptObserver]()
        for index, (part, core) in enumerate(zip(parts, cores, strict=True)):
            times = DecodeTimes(steps if fleet is None else steps.of_replica(index))
            lives.append(LifeObserver(core, times, detail, _handed(part), loading))
            prompts.append(PromptObserver(core, has_salts=has_salts))
            core.observer = _Observers(lives[-1], prompts[-1])
        playback = Playback.of(plan, cores[0].clock)

        def after(log: RunLog, record: StepRecord | None) -> None:
            if record is not None:
                if playback is not None:
                    playback.after(record)
                on_step(len(log.steps))

        limit = plan.config.workload.concurrency
        log = drive(engine, plan.requests, concurrency=limit, on_step=after, at_once=False)
    records = {record.key: record for record in log.records}
    if fleet is not None:
        return _followed(plan, fleet, records, lives, prompts)
    whole = {key: lives[0].ended(key, record.finished_s) for key, record in records.items()}
    return Explanation(plan, records, _known(whole), prompts[0].prompts, {}, {})


def _followed(
    plan: RunPlan,
    fleet: Fleet,
    records: dict[SampleKey, RequestRecord],
    lives: Sequence[LifeObserver],
    prompts: Sequence[PromptObserver],
) -> Explanation:
    """Explain a run of a fleet, whose requests are followed from replica to replica."""
    hops, pulls = hops_of(fleet.routed), dict[str, list[Transfer]]()
    for pull in (pull for neighbour in fleet.neighbours for pull in neighbour.pulls):
        pulls.setdefault(pull.request_id, []).append(pull)
    whole = {key: joined_life(record, hops.get(key[0], ()), lives) for key, record in records.items()}
    for life in (life for key, life in whole.items() if life is not None and key[0] in pulls):
        life.rename(Cause.TIER, Cause.TRANSFER)
    found = {key: prompt_of(record, hops.get(key[0], ()), prompts) for key, record in records.items()}
    return Explanation(plan, records, _known(whole), _known(found), hops, pulls)


def _known(values: Mapping[SampleKey, T | None]) -> dict[SampleKey, T]:
    return {key: value for key, value in values.items() if value is not None}


def quiet(config: RunConfig) -> RunConfig:
    """The run without what changes no decision."""
    return replace(config, figures=False, debug=replace(config.debug, audit=False, profile=False))


def _played_back(config: RunConfig, directory: Path) -> RunConfig:
    """A run that computed its steps, with the times that were recorded."""
    return replace(quiet(config), executor=replace(config.executor, kind="playback", recording=str(directory)))


@contextmanager
def served_from(plan: RunPlan) -> Iterator[tuple[ServingEngine, list[EngineCore]]]:
    """The plan's engine as its clients see it, and those of its replicas without their front ends."""
    engine = make_engine(plan, Profiler(enabled=False))
    parts = [replica.engine for replica in engine.replicas] if isinstance(engine, Fleet) else [engine]
    cores = [part.core if isinstance(part, FrontEnd) else part for part in parts]
    try:
        yield engine, [core for core in cores if isinstance(core, EngineCore)]
    finally:
        engine.close()


def _handed(engine: object) -> Callable[[], float] | None:
    return (lambda: engine.handed_s) if isinstance(engine, FrontEnd) else None
