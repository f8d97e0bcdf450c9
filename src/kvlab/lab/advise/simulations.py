"""The simulations of advice: each once, on several cores, kept in a file from which the same command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.config import RunConfig
from kvlab.config.groups import with_settings
from kvlab.errors import KvlabError
from kvlab.lab.advise.segments import Segment
from kvlab.lab.processes import in_processes
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import RunLog, drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.serve import finish_log, make_engine
from kvlab.lab.settings import as_word

Settings = Mapping[str, Any]  # by dotted key
# CPU of a simulated step and of a request, measured: a unit of work, not a promise.
_STEP_S, _REQUEST_S = 70e-6, 2e-3
_ARRAYS = ("ttft_ms", "tpot_ms", "e2el_ms")
_DIGITS = 6  # of a latency in ms: those of a file are those of a simulation


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
    latencies = {name: np.full(len(names), np.nan) for name in _ARRAYS}
    for record in log.records:
        if (number := place.get(record.request_id)) is None or not record.completed:
            continue
        for name, values in latencies.items():  # of several samples the last to end
            if (value := getattr(record, name)) is not None:
                values[number] = np.nanmax([values[number], round(value, _DIGITS)])
    metrics = run_metrics(log, plan.pool, slo=config.slo)
    metrics["capacity/blocks"] = float(plan.pool.num_blocks)
    work_s = _STEP_S * len(log.steps) + _REQUEST_S * len(segment.requests)
    ttft, tpot, e2el = latencies.values()
    timing = str(plan.chosen["timing"])
    return Outcome(settings, ttft, tpot, e2el, metrics, devices_of(config), timing, work_s)


class Simulations:
    """What was simulated of today's configuration with other settings. `on_end` is told of each that ends."""

    def __init__(self, config: RunConfig, file: Path, cores: int) -> None:
        self.config, self.cores = config, cores
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self.work_s = 0.0  # of all that were asked for, whether simulated now or before
        self._file = file
        self._known: dict[str, Outcome] = _read(file)
        self._done: set[str] = set()

    @property
    def count(self) -> int:
        """How many different ones were asked for."""
        return len(self._done)

    def run(self, settings: Iterable[Settings], segment: Segment) -> list[Outcome]:
        """Their outcomes, in order. Raises CapacityError where a process was killed."""
        keys, tasks = list[str](), dict[str, Settings]()
        for each in settings:
            keys.append(_key(each, segment))
            tasks[keys[-1]] = dict(sorted(each.items()))
        missing = [key for key in tasks if key not in self._known]

        def work(key: str) -> Outcome:
            return simulate(self.config, tasks[key], segment)

        killed = "a process was killed, perhaps for memory: take fewer minutes=, or a workload.window"
        for key, outcome in in_processes(work, missing, self.cores, killed=killed):
            self._known[key] = outcome
            self._append(key, outcome)
            self.on_end(outcome)
        for key in [key for key in tasks if key not in self._done]:  # in order, for the same sum
            self._done.add(key)
            self.work_s += self._known[key].work_s
        return [self._known[key] for key in keys]

    def one(self, settings: Settings, segment: Segment) -> Outcome:
        """A single one."""
        return self.run([settings], segment)[0]

    def _append(self, key: str, outcome: Outcome) -> None:
        values = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
        values |= {name: [None if np.isnan(v) else v for v in values[name].tolist()] for name in _ARRAYS}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"task": key, **values}) + "\n")


def _key(settings: Settings, segment: Segment) -> str:
    """Other settings on a segment as text; equal for equal ones, in whatever order."""
    return " ".join([*(as_word(name, value) for name, value in sorted(settings.items())), f"on {segment.name}"])


def _read(file: Path) -> dict[str, Outcome]:
    """Those of a file; a last line that was cut off is left out."""
    found: dict[str, Outcome] = {}
    if not file.exists():
        return found
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = values.pop("task")
        values |= {name: np.array(values[name], dtype=np.float64) for name in _ARRAYS}
        found[key] = Outcome(**values)
    return found
