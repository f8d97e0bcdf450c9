"""One run from configuration to result: plan, serve, measure, record."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvlab.errors import CapacityError, KvlabError
from kvlab.lab.files import attempt, claimed, sentences
from kvlab.lab.machine import CpuWatch, oversubscription
from kvlab.lab.results.answers import with_text
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.sureness import Predicted, predicted
from kvlab.lab.run.interrupt import stop_on_signal
from kvlab.lab.run.measure import measure
from kvlab.lab.run.peer_plan import Plan, plan_any
from kvlab.lab.run.plan import RunPlan
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.recording import Recording
from kvlab.lab.run.recording import RunContext as RunContext
from kvlab.lab.run.reporter import Reporter
from kvlab.lab.run.reporter import RunResult as RunResult
from kvlab.lab.run.serve import serve, start_engine
from kvlab.lab.run.trace import trace_events, write_trace
from kvlab.lab.tracking import RunStatus
from kvlab.plugins import reason_of
from kvlab.run_files import TRACE
from kvlab.secrets import redact


def execute(context: RunContext) -> RunResult:
    """Run a configuration. Ctrl-C ends it early and keeps what was measured.

    Raises a KvlabError for a configuration that cannot work, which is recorded only as a point of a sweep, and for
    an output directory that cannot be written to before the run. A tracking store or a disk that fails later is
    reported in the result: every other file is complete, and the figures are printed.
    """
    with ExitStack() as claim, ExitStack() as guard:
        if not context.in_sweep:  # whose directory was checked
            claim.enter_context(claimed("hydra.run.dir", context.directory))
        # From the start: a signal that nothing handles would leave the run open.
        try:
            return _execute(context, guard.enter_context(stop_on_signal(context.console)), guard.close)
        finally:
            if context.in_sweep and context.made.config.executor.kind != "simulated":
                gc.collect()  # an engine and its parts name each other, and the next point needs its memory


def _execute(context: RunContext, should_stop: Callable[[], bool], unguard: Callable[[], None]) -> RunResult:
    config, reporter = context.made.config, Reporter(context)
    watch = CpuWatch(context.beside.pid if context.beside else None)
    try:
        plan = plan_any(config)
    except KvlabError as error:
        if context.in_sweep:
            Recording(context).finish(RunLog(), {}, _failure(error), str(error))
        raise
    recording = Recording(context, plan)
    reporter.announce(plan)
    if crowded := _crowded(plan, watch):
        reporter.note(crowded)
    profiler = Profiler(enabled=config.debug.profile)
    log, problem, status, metrics = RunLog(), None, RunStatus.FINISHED, dict[str, float]()
    sure = dict[str, Predicted]()
    failed: Exception | None = None
    try:
        reporter.estimate(plan)
        engine = start_engine(plan, context.directory, profiler, should_stop)
        reporter.engine(engine)
        recording.wait_until_open()  # so that tracking does nothing while requests are served
        served = serve(engine, plan, context.console, profiler, should_stop)
        log = served.log
        unguard()  # nothing below has steps to stop after
        if plan.tokenizer is not None:
            log.records = with_text(log.records, plan.requests, plan.tokenizer, plan.model.eos_token_ids)
        metrics = measure(plan, served, profiler, may_measure=crowded is None)
        sure = _predicted(plan, log)
        reporter.served(plan, served, sure)
        if served.playback is not None and not log.interrupted:
            reporter.note(served.playback.finish(log), "note")
        if profiler.enabled or config.figures:
            _write_trace(plan, context, log, profiler, recording)
        status, problem = _ending(log)
        if status is RunStatus.FINISHED and plan.own is not None:
            metrics |= _quality(plan.own, reporter)
    except KeyboardInterrupt:
        status = RunStatus.INTERRUPTED
    except Exception as error:
        failed, status, problem, sure = error, _failure(error), reason_of(error), {}
    is_stopped = status is RunStatus.INTERRUPTED
    with stop_on_signal(context.console, "stopping once the results are written", asked=is_stopped) as was_asked:
        recording.finish(log, metrics, status, problem, sure.get(""))
    is_for_others = context.in_sweep and was_asked() and not is_stopped  # this run has ended, not those behind it
    if failed is not None:
        if is_for_others:
            raise KeyboardInterrupt from failed
        raise failed
    unwritten = tuple(sentences(recording.unwritten))
    result = RunResult(context.name, status, metrics, problem, recording.error, unwritten)
    reporter.result(result, recording.tracker, known_only=plan.own is None, brief=not config.verbose)
    if is_for_others:
        raise KeyboardInterrupt
    return result


def _crowded(plan: Plan, watch: CpuWatch) -> str | None:
    """Why this machine's processors are too busy for a measurement; None: they are not, or it needs none."""
    return oversubscription(plan.cpu_threads, watch.busy_cores()) if plan.cpu_threads else None


def _predicted(plan: Plan, log: RunLog) -> dict[str, Predicted]:
    """How sure the latencies are that measured operations predict: of each group by its name, and by none of all;
    nothing of another run.
    """
    limits = plan.config.slo.limits
    found, groups = dict[str, Predicted | None](), list[tuple[range, RunPlan]]()
    for name, replicas, part in plan.parts:
        groups.append((replicas, part))
        if len(plan.parts) > 1:
            records = [record for record in log.records if record.replica in replicas]
            found[name] = predicted(groups[-1:], replace(log, records=records, refused=[]), limits)
    found[""] = predicted(groups, log, limits)
    return {name: sure for name, sure in found.items() if sure is not None}


def _quality(plan: RunPlan, reporter: Reporter) -> dict[str, float]:
    """What fewer bits cost, where something was computed."""
    if plan.kernels is None:
        return {}
    from kvlab.lab.results.quality import quality_metrics  # this late, since it imports torch

    metrics, advice = quality_metrics(plan, plan.requests)
    if advice:
        reporter.note(advice)
    return metrics


def _write_trace(plan: Plan, context: RunContext, log: RunLog, profiler: Profiler, recording: Recording) -> None:
    title = context.name if plan.is_real else f"{context.name}, {plan.machine}"
    events = trace_events(title, log.steps, log.records, profiler.steps)
    with attempt(recording.unwritten):
        write_trace(context.directory / TRACE, events)


def _ending(log: RunLog) -> tuple[RunStatus, str | None]:
    """How a run ended that was served, and what was wrong."""
    if log.interrupted:
        return RunStatus.INTERRUPTED, None
    if log.completed and log.engine_report is not None and log.engine_report.invalid:
        return RunStatus.FAILED, f"invalid: {log.engine_report.invalid}"
    if log.completed:
        return RunStatus.FINISHED, None
    errors = [record.error for record in log.records if record.error]
    return RunStatus.FAILED, redact([*errors, *log.refused, "no request completed"][0])


def _failure(error: Exception) -> RunStatus:
    return RunStatus.OUT_OF_MEMORY if isinstance(error, CapacityError) else RunStatus.FAILED
