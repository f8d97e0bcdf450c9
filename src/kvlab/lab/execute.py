"""One run from configuration to result: build, drive, measure, write, track."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvlab.config import RunConfig, format_bytes
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine
from kvlab.engine.engine import Engine
from kvlab.errors import AuditError, CapacityError, KvlabError, TrackingError
from kvlab.lab.artifacts import write_artifacts
from kvlab.lab.build import RunPlan, plan_run
from kvlab.lab.drive import RunLog, completed, drive
from kvlab.lab.interrupt import stop_on_signal
from kvlab.lab.machine import CpuWatch, describe, oversubscription, peak_memory
from kvlab.lab.metrics import run_metrics
from kvlab.lab.profile import Part, Profiler
from kvlab.lab.progress import RunProgress
from kvlab.lab.quality import quality_metrics, uses_int8
from kvlab.lab.rates import known_rates, measure_and_keep
from kvlab.lab.roofline import roofline, run_costs
from kvlab.lab.tables import config_tree, profile_table, summary_table
from kvlab.lab.trace import write_trace
from kvlab.lab.tracking import NullTracker, RunStatus, Tracker, start_run
from kvlab.workloads.digest import workload_digest


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where a run lives: its output directory, the repository's root, what it is called, its sweep."""

    directory: Path
    root: Path
    config_yaml: str
    choices: Mapping[str, str]
    console: Console
    name: str
    in_sweep: bool = False
    parent_run_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended and what it measured."""

    name: str
    status: RunStatus
    metrics: dict[str, float]
    error: str | None = None
    tracking_error: str | None = None


def execute(config: RunConfig, context: RunContext) -> RunResult:
    """Run a configuration. Ctrl-C ends it early and keeps what was measured.

    Raises a KvlabError for a configuration that cannot work. As a point of a sweep it is recorded all the same;
    a single run is recorded once its configuration was found sound. A tracking store that fails is told in the
    result: the files in the output directory are complete without it.
    """
    watch = CpuWatch()
    try:
        plan = plan_run(config)
    except KvlabError as error:
        if context.in_sweep:
            _Tracking(config, context).finish(RunLog(), {}, _failure(error), str(error))
        raise
    tracking = _Tracking(config, context, plan)
    _announce(plan, context)
    crowded = oversubscription(plan.threads, watch.busy_cores()) if plan.device == "cpu" else None
    if crowded:
        context.console.print(f"[yellow]warning:[/] {crowded}", highlight=False, soft_wrap=True)
    profiler = Profiler() if config.debug.profile else None
    log, engine_error, status = RunLog(), None, RunStatus.FINISHED
    metrics: dict[str, float] = {}
    try:
        log, leaked = _drive(plan, context.console, profiler)
        metrics = run_metrics(log, plan.pool, leaked_blocks=leaked)
        metrics |= _efficiency(plan, log, may_measure=crowded is None)
        if profiler is not None:
            metrics |= profiler.metrics()
            write_trace(context.directory / "trace.json", context.name, profiler.steps)
        if log.interrupted:
            status = RunStatus.INTERRUPTED
        elif completed(log):
            metrics |= _quality(plan, context.console)
        else:
            status = RunStatus.FAILED
            engine_error = next(
                (s.error for s in log.sequences if s.error), next(iter(log.refused), "no request completed")
            )
    except KeyboardInterrupt:
        status = RunStatus.INTERRUPTED
    except KvlabError as error:
        tracking.finish(log, metrics, _failure(error), str(error), plan)
        raise
    except Exception as error:
        tracking.finish(log, metrics, RunStatus.FAILED, f"{type(error).__name__}: {error}", plan)
        raise
    tracking.finish(log, metrics, status, engine_error, plan)
    _report(context, metrics, status, engine_error, tracking)
    return RunResult(context.name, status, metrics, engine_error, tracking.error)


def _drive(plan: RunPlan, console: Console, profiler: Profiler | None) -> tuple[RunLog, int]:
    """Build the engine, which is gone at the end, and serve the requests. Returns what happened and the number of
    leaked blocks.
    """
    engine = build_engine(plan) if profiler is None else profiler.build(plan)
    with stop_on_signal(console) as stop, RunProgress(plan.requests, console) as progress:

        def after_step(log: RunLog, record: StepRecord | None) -> None:
            if plan.config.debug.audit:
                _check(engine, log)
            if profiler is not None:
                profiler.end_step(record)
            progress(log, record)

        log = drive(engine, plan.requests, should_stop=lambda: stop.is_set, on_step=after_step)
    findings = engine.pool.audit()
    for finding in findings:
        console.print(f"[red]audit: {finding}[/]")
    return log, sum(finding.rule == "leaked" for finding in findings)


def _quality(plan: RunPlan, console: Console) -> dict[str, float]:
    """What int8 costs in quality, where the run uses it."""
    if not uses_int8(plan.config):
        return {}
    metrics, problem = quality_metrics(plan, plan.requests)
    if problem:
        console.print(problem, highlight=False, soft_wrap=True)
    return metrics


def _efficiency(plan: RunPlan, log: RunLog, *, may_measure: bool) -> dict[str, float]:
    """The share of the roofline that the run reached; none on a GPU, or where this machine's rates are not known
    and cannot be measured now.
    """
    if plan.device != "cpu" or not log.steps:
        return {}
    dtype = plan.config.executor.dtype
    rates = known_rates(dtype) or (measure_and_keep(dtype) if may_measure else None)
    return {} if rates is None else {"efficiency/roofline_share": roofline(run_costs(plan), log.steps, rates).share}


class _Tracking:
    """A run's record on disk and in the store. The first failure of the store is kept, and ends its use."""

    def __init__(self, config: RunConfig, context: RunContext, plan: RunPlan | None = None) -> None:
        self._config, self._context = config, context
        self.error: str | None = None
        self.tracker: Tracker = NullTracker()
        if config.tracking.backend == "off":
            return
        tags = {f"choice.{group}": choice for group, choice in context.choices.items()}
        if plan is not None:
            tags |= {"resolved.attention": plan.attention.name, "resolved.kernels": plan.ops.name}
        try:
            self.tracker = start_run(
                config.tracking,
                root=context.root,
                run_name=context.name,
                params=flatten(dataclasses.asdict(config)),
                tags=tags | config.tags,
                parent_run_id=context.parent_run_id,
            )
        except TrackingError as error:
            self._failed(error)

    def finish(
        self,
        log: RunLog,
        metrics: dict[str, float],
        status: RunStatus,
        error: str | None,
        plan: RunPlan | None = None,
    ) -> None:
        """Write the run's files, then hand them to the store."""
        directory = self._context.directory
        summary: dict[str, Any] = {
            "name": self._context.name,
            "run_id": self.tracker.run_id,
            "status": status,
            "error": error,
            "metrics": metrics,
            "choices": dict(self._context.choices),
            "peak_memory_bytes": peak_memory(),
        }
        if plan is not None:
            summary |= {
                "attention": plan.attention.name,
                "kernels": plan.ops.name,
                "machine": describe(plan.device),
                "device": plan.device,
                "threads": plan.threads,
                "weight_bytes": plan.weight_bytes,
                "bytes_per_weight": run_costs(plan).bytes_per_weight,
                "kv_bytes_per_token": plan.pool.bytes_per_token,
                "workload_digest": workload_digest(plan.requests),
            }
        write_artifacts(directory, log, summary, self._context.config_yaml)
        try:
            self.tracker.log_metrics(metrics)
            self.tracker.log_series(_series(log))
            self.tracker.log_artifacts(directory)
            self.tracker.finish(status, error)
        except TrackingError as problem:
            self._failed(problem)

    def _failed(self, error: TrackingError) -> None:
        self.error = str(error)
        self.tracker = NullTracker()
        self._context.console.print(f"[yellow]warning:[/] {error}", highlight=False, soft_wrap=True)
        self._context.console.print(f"the run's results are kept in {self._context.directory}", highlight=False)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif value != {}:
            flat[f"{prefix}{key}"] = value
    return flat


def _check(engine: Engine, log: RunLog) -> None:
    """Raise AuditError if the pool is not sound."""
    findings = engine.pool.audit()
    if findings:
        shown = "; ".join(str(finding) for finding in findings[:5])
        raise AuditError(f"after step {len(log.steps)}: {len(findings)} broken invariant(s): {shown}")


def _failure(error: KvlabError) -> RunStatus:
    return RunStatus.OUT_OF_MEMORY if isinstance(error, CapacityError) else RunStatus.FAILED


def _series(log: RunLog) -> dict[str, list[tuple[int, float, float]]]:
    names = (
        "running",
        "waiting",
        "blocks_in_use",
        "blocks_cached",
        "shared_blocks",
        "tokens_in_use",
        "prefill_tokens",
        "decode_tokens",
    )
    return {name: [(step.index, step.end_s, float(getattr(step, name))) for step in log.steps] for name in names}


def _announce(plan: RunPlan, context: RunContext) -> None:
    config, pool = plan.config, plan.pool
    if context.in_sweep:
        context.console.rule(f"[bold]{context.name}[/]", align="left", style="dim")
    else:
        context.console.print(config_tree(dataclasses.asdict(config), context.choices))
    kind = "blocks" if config.kv.backend == "paged" else "slots"
    weights = config.executor.dtype if config.executor.weights == "auto" else config.executor.weights
    context.console.print(
        f"{config.model.name}: {plan.model.num_parameters / 1e6:,.0f} M parameters, "
        f"{format_bytes(plan.weight_bytes)} in {weights}; KV cache: {pool.num_blocks} {kind} of "
        f"{pool.block_size} tokens, {format_bytes(pool.num_bytes)} in {config.kv_dtype}; "
        f"attention: {plan.attention.name}, other kernels: {plan.ops.name}; "
        f"{len(plan.requests)} requests on {describe(plan.device)}"
        + (f", {plan.threads} thread{'s' * (plan.threads > 1)}" if plan.device == "cpu" else ""),
        highlight=False,
    )


def _report(
    context: RunContext,
    metrics: Mapping[str, float],
    status: RunStatus,
    error: str | None,
    tracking: _Tracking,
) -> None:
    console = context.console
    if metrics and not context.in_sweep:
        console.print(summary_table(context.name, metrics))
        if "profile/other_share" in metrics:
            console.print(profile_table(metrics, list(Part)))
    if status is RunStatus.INTERRUPTED:
        console.print("[yellow]interrupted:[/] the figures are those of the part that ran")
    if error:
        console.print(f"[red]failed:[/] {error}", highlight=False, soft_wrap=True)
    console.print(f"results: {context.directory}", highlight=False, soft_wrap=True)
    if not context.in_sweep:
        if tracking.tracker.run_id:
            console.print(f"run {tracking.tracker.run_id}", highlight=False)
        console.print(tracking.tracker.where(), highlight=False, soft_wrap=True)
