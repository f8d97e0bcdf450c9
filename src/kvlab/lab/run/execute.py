"""One run from configuration to result: build, drive, measure, write, track."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvlab.config import RunConfig, format_bytes
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine
from kvlab.engine.clock import LogicalClock
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.protocol import Auditable, Journaled, Reporting, ServingEngine
from kvlab.engine.threads import explain_threads
from kvlab.errors import AuditError, CapacityError, KvlabError
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pools import POOLS
from kvlab.kv.tiers.build import tier_pages
from kvlab.lab.files import attempt, check_directory, sentences
from kvlab.lab.machine import CpuWatch, oversubscription
from kvlab.lab.machine_rates import known_rates, measure_and_keep
from kvlab.lab.results.answers import sample_answers, with_text
from kvlab.lab.results.metrics import run_metrics, speculation_metrics
from kvlab.lab.results.quality import quality_metrics
from kvlab.lab.results.recording import Recording
from kvlab.lab.results.recording import RunContext as RunContext
from kvlab.lab.results.roofline import roofline, run_costs
from kvlab.lab.results.tables import comparison_table, config_tree, profile_table
from kvlab.lab.results.trace import trace_events, write_trace
from kvlab.lab.run.build import PeerPlan, RunPlan, plan_peer, plan_run, planned_metrics
from kvlab.lab.run.drive import RunLog, drive
from kvlab.lab.run.front_end import behind_front_end
from kvlab.lab.run.interrupt import stop_on_signal
from kvlab.lab.run.playback import Playback
from kvlab.lab.run.profile import Part, Profiler
from kvlab.lab.run.progress import show_progress
from kvlab.lab.settings import as_recorded, flatten
from kvlab.lab.terminal import Terminal, marked, print_note
from kvlab.lab.tracking import RunStatus, Tracker
from kvlab.secrets import redact


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended and what it measured."""

    name: str
    status: RunStatus
    metrics: dict[str, float]
    error: str | None = None
    tracking_error: str | None = None
    unwritten: tuple[str, ...] = ()  # why files are missing, a sentence each


def execute(config: RunConfig, context: RunContext) -> RunResult:
    """Run a configuration. Ctrl-C ends it early and keeps what was measured.

    Raises a KvlabError for a configuration that cannot work, which is recorded only as a point of a sweep, and for
    an output directory that cannot be written to before the run. A tracking store or a disk that fails later is
    reported in the result: every other file is complete, and the figures are printed.
    """
    if not context.in_sweep:  # whose directory was checked
        check_directory("hydra.run.dir", context.directory)
    with ExitStack() as guard:  # from the start: a signal that nothing handles would leave the run open
        return _execute(config, context, guard.enter_context(stop_on_signal(context.console)), guard.close)


def _execute(
    config: RunConfig, context: RunContext, should_stop: Callable[[], bool], unguard: Callable[[], None]
) -> RunResult:
    watch = CpuWatch()
    try:
        plan = plan_peer(config) or plan_run(config)
    except KvlabError as error:
        if context.in_sweep:
            Recording(config, context).finish(RunLog(), {}, _failure(error), str(error))
        raise
    tracking = Recording(config, context, plan)
    _announce(plan, context)
    own = plan if isinstance(plan, RunPlan) else None  # else the engine is not kvlab's
    kernels = own.kernels if own is not None and own.device == "cpu" else None
    crowded = oversubscription(kernels.threads, watch.busy_cores()) if kernels is not None else None
    if crowded:
        print_note(context.console, crowded)
    profiler = Profiler(enabled=config.debug.profile)
    log, engine_error, status = RunLog(), None, RunStatus.FINISHED
    metrics: dict[str, float] = {}
    try:
        engine: ServingEngine
        if isinstance(plan, PeerPlan):
            engine = plan.start(context.directory, should_stop)
        else:
            engine = make_engine(plan, profiler)
        _show_engine(engine, context)
        tracking.settle()  # so that tracking does nothing while requests are served
        playback = _playback(engine, plan)
        try:
            log, leaked = _drive(engine, plan, context.console, profiler, should_stop, playback)
        finally:
            if isinstance(engine, Reporting):  # whose processes would outlive the run
                engine.close()
        unguard()  # nothing below has steps to stop after
        if plan.tokenizer is not None:
            log.records = with_text(log.records, plan.requests, plan.tokenizer, plan.model.eos_token_ids)
        _show_answers(log, context)
        metrics = run_metrics(log, own.pool if own is not None else None, leaked_blocks=leaked, slo=config.slo)
        if own is not None:
            if config.scheduler.speculation.method is not None:
                metrics |= speculation_metrics(log.steps)
            metrics |= planned_metrics(own) | _efficiency(own, log, may_measure=crowded is None)
        metrics |= profiler.metrics()
        for remark in _remarks(own, log):
            print_note(context.console, remark)
        if playback is not None and not log.interrupted:
            print_note(context.console, playback.finish(log), "note")
        if profiler.enabled or config.figures:
            is_real = own is None or own.is_real
            title = context.name if is_real else f"{context.name}, {plan.machine}"
            events = trace_events(title, log.steps, log.records, profiler.steps)
            with attempt(tracking.unwritten):
                write_trace(context.directory / "trace.json", events)
        if log.interrupted:
            status = RunStatus.INTERRUPTED
        elif log.completed and log.told is not None and log.told.invalid:
            status, engine_error = RunStatus.FAILED, f"invalid: {log.told.invalid}"
        elif log.completed:
            metrics |= _quality(own, context.console) if own is not None else {}
        else:
            status = RunStatus.FAILED
            errors = [record.error for record in log.records if record.error]
            engine_error = redact([*errors, *log.refused, "no request completed"][0])
    except KeyboardInterrupt:
        status = RunStatus.INTERRUPTED
    except Exception as error:
        reason = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
        tracking.finish(log, metrics, _failure(error), reason)
        raise
    tracking.finish(log, metrics, status, engine_error)
    unwritten = tuple(sentences(tracking.unwritten))
    result = RunResult(context.name, status, metrics, engine_error, tracking.error, unwritten)
    _report(context, result, tracking.tracker, known_only=own is None)
    return result


def make_engine(plan: RunPlan, profiler: Profiler) -> ServingEngine:
    """The engine of a run. The only place that knows which engine it is."""
    faults = plan.config.debug.faults
    build = profiler.build if profiler.enabled else build_engine
    words = plan.tokenizer is not None and any(request.sampling.stop for request in plan.requests)
    engine = build(
        plan,
        detokenize=plan.tokenizer.decode if plan.tokenizer is not None and words else None,
        journal=BlockJournal() if plan.config.figures or plan.recording is not None else None,
        wrap=partial(FaultyExecutor, config=faults) if faults.rate > 0 else None,
    )
    return engine if plan.timing is None else behind_front_end(engine, plan.config.framework)


def _drive(
    engine: ServingEngine,
    plan: RunPlan | PeerPlan,
    console: Terminal,
    profiler: Profiler,
    should_stop: Callable[[], bool],
    playback: Playback | None,
) -> tuple[RunLog, int | None]:
    """Serve the requests. Returns what happened and how many blocks leaked, None for an engine without audit."""
    with show_progress(engine, plan.requests, console) as progress:

        def after_step(log: RunLog, record: StepRecord | None) -> None:
            if plan.config.debug.audit and (broken := _audit(engine)):
                shown = "; ".join(map(str, broken[:5]))
                raise AuditError(f"after step {len(log.steps)}: {len(broken)} broken invariant(s): {shown}")
            if playback is not None and record is not None:
                playback.after(record)
            profiler.end_step(record)
            progress(log, record)

        limit = plan.config.workload.concurrency
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
    findings = _audit(engine)
    if isinstance(engine, Reporting):
        log.told = engine.report()
    for finding in findings or ():
        console.print(f"audit: {finding}", style="red")
    engine.close()
    return log, None if findings is None else sum(finding.rule == "leaked" for finding in findings)


def _show_engine(engine: ServingEngine, context: RunContext) -> None:
    """Say what an engine that is not kvlab's is."""
    if isinstance(engine, Reporting):
        facts = ", ".join(f"{name} {value}" for name, value in engine.report().facts.items())
        context.console.print(f"engine: {facts}", highlight=False, soft_wrap=True)


def _remarks(own: RunPlan | None, log: RunLog) -> list[str]:
    """What a user should know of a run's times."""
    if log.told is not None:
        return list(log.told.notes)
    remark = own.timing.remark(log.steps) if own is not None and own.timing is not None else None
    return [remark] if remark else []


def _playback(engine: ServingEngine, plan: RunPlan | PeerPlan) -> Playback | None:
    """What holds a playback against its recording; None for a run that is none."""
    recording = plan.recording if isinstance(plan, RunPlan) else None
    if recording is None or not isinstance(engine.clock, LogicalClock):
        return None
    return Playback(recording, engine.clock, flatten(dataclasses.asdict(plan.config)))


def _audit(engine: ServingEngine) -> list[Finding] | None:
    return engine.audit() if isinstance(engine, Auditable) else None


def _quality(plan: RunPlan, console: Terminal) -> dict[str, float]:
    metrics, problem = quality_metrics(plan, plan.requests)
    if problem:
        console.print(problem, highlight=False, soft_wrap=True)
    return metrics


def _efficiency(plan: RunPlan, log: RunLog, *, may_measure: bool) -> dict[str, float]:
    """The share of the roofline that was reached; none on a GPU, or without this machine's rates."""
    if plan.device != "cpu" or not log.steps:
        return {}
    dtype = plan.config.executor.dtype
    rates = known_rates(dtype) or (measure_and_keep(dtype) if may_measure else None)
    return {} if rates is None else {"efficiency/roofline_share": roofline(run_costs(plan), log.steps, rates).share}


def _failure(error: Exception) -> RunStatus:
    return RunStatus.OUT_OF_MEMORY if isinstance(error, CapacityError) else RunStatus.FAILED


def _announce(plan: RunPlan | PeerPlan, context: RunContext) -> None:
    config = plan.config
    if context.in_sweep:
        heading = marked("[bold]{}[/]", context.heading or context.name)
        context.console.rule(heading, align="left", style="dim")
    else:
        recorded = as_recorded(dataclasses.asdict(config), context.written)
        context.console.print(config_tree(recorded, context.choices))
    if isinstance(plan, PeerPlan):
        count = f"{len(plan.requests)} requests of {redact(config.workload.name)}"
        context.console.print(f"{config.engine.kind} on {plan.machine}: {count}", highlight=False, soft_wrap=True)
        return
    pool = plan.pool
    kind, kernels = f"{POOLS.get(config.kv.backend).unit}s", plan.kernels
    chosen, computed = plan.chosen.get("kernels"), ""
    if kernels:
        reason = f" ({kernels.ops.reason})" if kernels.ops.reason and chosen == kernels.ops.name else ""
        computed = f"attention: {kernels.attention.name}, other kernels: {chosen}{reason}; "
    threads = kernels.threads if kernels and plan.device == "cpu" else 0
    why = explain_threads(config.executor.threads, threads) if threads else ""
    weights = config.executor.weights_dtype
    if plan.weights_format == "compact":
        weights += ", kept in 12 bits each"
    tiers = {"host memory": "kv.offload", "disk": "kv.offload_disk"}
    behind = [
        f"{pages:,} more in {name}" for name, key in tiers.items() if (pages := tier_pages(config.kv, pool, key))
    ]
    context.console.print(
        f"{redact(config.model.name)}: {plan.model.num_parameters / 1e6:,.0f} M parameters, "
        f"{format_bytes(plan.weights.parameters)} in {weights}; KV cache: {pool.num_blocks} {kind} of "
        f"{pool.block_size} tokens, {format_bytes(pool.num_bytes)} in {config.kv_dtype}"
        f"{''.join(f', {text}' for text in behind)}; "
        f"{computed}{len(plan.requests)} requests on {plan.machine}"
        + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")
        + (f" ({why})" if why else ""),
        highlight=False,
    )


def _show_answers(log: RunLog, context: RunContext) -> None:
    """A sample of a run's words; none in a sweep, whose points would drown in them."""
    for answer in () if context.in_sweep else sample_answers(log.records):
        context.console.print(marked("[bold]{}[/] {}", f"{answer.name}:", answer.prompt), soft_wrap=True)
        context.console.print(f"  {answer.text} ({answer.ending})", highlight=False, soft_wrap=True)


def _report(context: RunContext, result: RunResult, tracker: Tracker, *, known_only: bool) -> None:
    console, metrics = context.console, result.metrics
    if metrics and (result.unwritten or not context.in_sweep):
        console.print(comparison_table([(result.name, metrics)], known_only=known_only))
        if "profile/other_share" in metrics:
            console.print(profile_table(metrics, list(Part)))
    if result.status is RunStatus.INTERRUPTED:
        console.print(marked("[yellow]interrupted:[/] the figures are those of the part that ran"))
    if result.error:
        console.print(marked("[red]failed:[/] {}", result.error), soft_wrap=True)
    console.print(f"results: {context.directory}", highlight=False, soft_wrap=True)
    if not context.in_sweep:
        if tracker.run_id:
            console.print(f"run {tracker.run_id}", highlight=False)
        console.print(tracker.where(), highlight=False, soft_wrap=True)
