"""Serves the requests of a run: builds its engine, drives it to the end, and closes it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from kvlab.core import StepRecord
from kvlab.engine.build import build_engine
from kvlab.engine.clock import LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.front_end import FrontEnd, behind_front_end
from kvlab.engine.protocol import Auditable, Journaled, Reporting, ServingEngine
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import AuditError
from kvlab.fleet.fleet import Fleet
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal
from kvlab.kv.tiers.tier import Tier
from kvlab.kv.view import CacheView
from kvlab.lab.results.log import FleetLog, RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.fleet import make_fleet
from kvlab.lab.run.peer_plan import PeerPlan, Plan
from kvlab.lab.run.plan import RunPlan
from kvlab.lab.run.playback import Playback
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.progress import show_progress
from kvlab.lab.run.prompt_tokens import PromptObserver, Reason
from kvlab.lab.terminal import Terminal


@dataclass(frozen=True, slots=True)
class Served:
    """What happened while a run's requests were served."""

    log: RunLog
    findings: list[Finding] | None = None  # of the audit at the end; None: of an engine without
    playback: Playback | None = None  # which held it against a recording
    prompts: Mapping[Reason, int] | None = None  # tokens by what became of them; None: nobody looked

    @property
    def leaked_blocks(self) -> int | None:
        """Blocks that nobody gave back. None: not known."""
        return None if self.findings is None else sum(finding.rule == "leaked" for finding in self.findings)


class _TimedExecutor(Executor):
    """An executor that says how long each pass took here, so that replicas which share a machine have clocks of
    their own, as if each had the machine to itself. What scheduling takes beside the pass is not counted.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        start = perf_counter()
        result = self._executor.execute(step, view)
        return replace(result, elapsed_s=perf_counter() - start)


def start_engine(plan: Plan, directory: Path, profiler: Profiler, should_stop: Callable[[], bool]) -> ServingEngine:
    """The engine of a run, which may be another than kvlab's."""
    return plan.start(directory, should_stop) if isinstance(plan, PeerPlan) else make_engine(plan, profiler)


def make_engine(plan: RunPlan, profiler: Profiler) -> ServingEngine:
    """kvlab's own engine for a run, or a fleet of them."""
    config, replicas = plan.config, plan.replicas
    if len(replicas) == 1:
        journal = BlockJournal() if config.figures or plan.recording is not None else None
        return _replica(replicas[0], profiler, journal)
    makers = [partial(_replica, replica, profiler, None) for replica in replicas]
    return make_fleet(config, replicas, plan.requests, makers)


def _replica(
    plan: RunPlan, profiler: Profiler, journal: BlockJournal | None, remote: Sequence[Tier] = ()
) -> EngineCore | FrontEnd:
    """An engine; one of several that compute here has a clock of its own."""
    faults, computes = plan.config.debug.faults, plan.is_real and plan.config.fleet.replicas > 1
    build = profiler.build if profiler.enabled else build_engine
    words = plan.tokenizer is not None and any(request.sampling.stop for request in plan.requests)

    def wrap(executor: Executor) -> Executor:
        inner = FaultyExecutor(executor, faults) if faults.rate > 0 else executor
        return _TimedExecutor(inner) if computes else inner

    engine = build(
        plan,
        detokenize=plan.tokenizer.decode if plan.tokenizer is not None and words else None,
        journal=journal,
        wrap=wrap if computes or faults.rate > 0 else None,
        clock=LogicalClock() if computes else None,
        remote=remote,
    )
    return engine if plan.timing is None else behind_front_end(engine, plan.config.framework)


def serve(
    engine: ServingEngine, plan: Plan, console: Terminal, profiler: Profiler, should_stop: Callable[[], bool]
) -> Served:
    """Serve the requests, and close the engine, whatever happens: its processes would outlive the run.

    Raises AuditError where `debug.audit` finds something, PlaybackError for a decision other than the recorded.
    """
    playback = None if plan.own is None else Playback.of(plan.own, engine.clock)
    prompts, limit = _prompts(engine, plan), plan.config.workload.concurrency
    with ExitStack() as guard:
        if isinstance(engine, Reporting):
            guard.callback(engine.close)
        elif isinstance(engine, EngineCore):
            guard.callback(engine.end_processes)
        with show_progress(engine, plan.requests, console) as progress:

            def after_step(log: RunLog, record: StepRecord | None) -> None:
                if plan.config.debug.audit and (broken := _audit(engine)):
                    shown = "; ".join(map(str, broken[:5]))
                    raise AuditError(f"after step {len(log.steps)}: {len(broken)} broken invariant(s): {shown}")
                if playback is not None and record is not None:
                    playback.after(record)
                if prompts is not None and record is not None:
                    prompts.catch_up(record.start_s)
                profiler.end_step(record)
                progress(log, record)

            log = drive(
                engine,
                plan.requests,
                concurrency=limit,
                should_stop=should_stop,
                on_step=after_step,
                at_once=playback is None and not plan.config.debug.audit,
            )
        if isinstance(engine, Journaled) and engine.journal is not None:
            log.blocks = engine.journal.columns(record.key for record in log.records)
        finish_log(engine, log)
        findings = _audit(engine)
        if isinstance(engine, Reporting):
            log.engine_report = engine.report()
        else:
            engine.close()
    return Served(log, findings, playback, None if prompts is None else prompts.counts())


def simulated(plan: RunPlan) -> RunLog:
    """What happened while a plan's requests were served on simulated devices."""
    engine = make_engine(plan, Profiler(enabled=False))
    try:
        log = drive(engine, plan.requests, concurrency=plan.config.workload.concurrency)
        finish_log(engine, log)
    finally:
        engine.close()
    return log


def finish_log(engine: ServingEngine, log: RunLog) -> None:
    """Add what a fleet knows of a run, and sort the steps of all replicas by time."""
    if isinstance(engine, Fleet):
        log.steps.sort()
        log.fleet = FleetLog.of(engine, log.duration_s)


def _prompts(engine: ServingEngine, plan: Plan) -> PromptObserver | None:
    """What counts why tokens of prompts are computed, of kvlab's own engine, if the run is to be looked at."""
    core = engine.core if isinstance(engine, FrontEnd) else engine
    if not plan.config.figures or not isinstance(core, EngineCore):
        return None
    core.observer = observer = PromptObserver(
        core, has_salts=any(request.salt is not None for request in plan.requests)
    )
    return observer


def _audit(engine: ServingEngine) -> list[Finding] | None:
    return engine.audit() if isinstance(engine, Auditable) else None
