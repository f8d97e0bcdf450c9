"""One simulation: settings, what of the traffic they serve, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.config import RunConfig
from kvlab.config.groups import with_settings
from kvlab.errors import KvlabError
from kvlab.lab.advise.segments import Segment
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import RunLog, drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.serve import finish_log, make_engine

Settings = Mapping[str, Any]  # by dotted key
# CPU of a simulated step and of a request, measured: a unit of work, not a promise.
_STEP_S, _REQUEST_S = 70e-6, 2e-3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a segment's counted requests took, in the order of the segment; NaN: it did not end as asked.

    `metrics` are those of the whole run. `error`: why these settings cannot run; all else is empty then.
    """

    settings: Settings
    ttft_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    e2el_ms: NDArray[np.float64]
    metrics: Mapping[str, float]
    devices: int
    timing: str = ""  # where the time of steps came from
    work_s: float = 0.0  # of the simulation, in units that are the same on every machine
    error: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.metrics.get("throughput/output_tokens_per_s", 0.0)

    @property
    def mean_s(self) -> float:
        """From arrival to end."""
        return float(np.nanmean(self.e2el_ms)) / 1000 if (~np.isnan(self.e2el_ms)).any() else float("nan")

    def figure(self, name: str, percent: float) -> float:
        """A percentile of a latency, in milliseconds."""
        values: NDArray[np.float64] = getattr(self, f"{name}_ms")
        known = values[~np.isnan(values)]
        return float(np.percentile(known, percent)) if len(known) else float("nan")


def devices_of(config: RunConfig) -> int:
    """Devices that all replicas have together."""
    return config.fleet.replicas * config.executor.devices


def served(plan: RunPlan) -> RunLog:
    """Serve a plan's requests on simulated devices."""
    engine = make_engine(plan, Profiler(enabled=False))
    log = drive(engine, plan.requests, concurrency=plan.config.workload.concurrency)
    finish_log(engine, log)
    return log


def simulate(config: RunConfig, settings: Settings, segment: Segment) -> Outcome:
    """The outcome of today's configuration with these settings."""
    none = np.empty(0)
    try:
        config = with_settings(config, settings)
        plan = plan_run(config, segment.requests)
        log = served(plan)
    except KvlabError as error:
        return Outcome(settings, none, none, none, {}, 0, error=str(error))
    names = [request.request_id for request in segment.requests if request.request_id in segment.counted]
    place = {name: number for number, name in enumerate(names)}
    latencies = {name: np.full(len(names), np.nan) for name in ("ttft", "tpot", "e2el")}
    for record in log.records:
        if (number := place.get(record.request_id)) is None or not record.completed:
            continue
        for name, values in latencies.items():  # of several samples the last to end
            value = getattr(record, f"{name}_ms")
            if value is not None:
                values[number] = np.nanmax([values[number], value])
    metrics = run_metrics(log, plan.pool, slo=config.slo)
    metrics["capacity/blocks"] = float(plan.pool.num_blocks)
    return Outcome(
        settings,
        latencies["ttft"],
        latencies["tpot"],
        latencies["e2el"],
        metrics,
        devices_of(config),
        str(plan.chosen["timing"]),
        _STEP_S * len(log.steps) + _REQUEST_S * len(segment.requests),
    )
