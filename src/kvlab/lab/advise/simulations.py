"""The simulations of advice: each once, kept in a file from which the same command goes on."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.config import RunConfig
from kvlab.core import RequestRecord
from kvlab.errors import KvlabError, OutputError
from kvlab.lab.advise.parts import changed, devices_of
from kvlab.lab.advise.segments import Segment
from kvlab.lab.files import attempt, writing
from kvlab.lab.processes import in_processes
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.serve import simulated
from kvlab.lab.settings import as_word
from kvlab.plugins import load_plugins

Settings = Mapping[str, Any]  # by dotted key
# CPU of a simulated step and of a request, measured: a unit of work, not a promise.
_STEP_S, _REQUEST_S = 70e-6, 2e-3
_LATENCIES = ("ttft", "tpot", "e2el")
_DIGITS = 6  # of a latency in ms: those of a file are those of a simulation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a segment's counted requests took, by ttft, tpot and e2el, in the order of the segment; NaN: it did not
    end as asked. `metrics` are those of the whole run. `error`: why these settings cannot run; all else is empty.
    """

    latencies_ms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    devices: int = 0
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
        known = self._known("e2el")
        return float(known.mean()) / 1000 if len(known) else float("nan")

    def figure(self, name: str, percent: float) -> float:
        """A percentile of a latency, in milliseconds."""
        known = self._known(name)
        return float(np.percentile(known, percent)) if len(known) else float("nan")

    def _known(self, name: str) -> NDArray[np.float64]:
        values = self.latencies_ms[name]
        return values[~np.isnan(values)]


def simulate(config: RunConfig, settings: Settings, segment: Segment) -> Outcome:
    """The outcome of today's configuration with these settings, in whichever process."""
    load_plugins(config.plugins)
    try:
        config = changed(config, settings)
        plan = plan_run(config, segment.requests)
        log = simulated(plan)
    except KvlabError as error:
        return Outcome(error=str(error))
    metrics = run_metrics(log, plan.pool, slo=config.slo)
    metrics["capacity/blocks"] = float(sum(replica.pool.num_blocks for replica in plan.replicas))
    work_s = _STEP_S * len(log.steps) + _REQUEST_S * len(segment.requests)
    latencies = _latencies(log.records, segment)
    return Outcome(latencies, metrics, devices_of(config), str(plan.chosen["timing"]), work_s)


def _latencies(records: Sequence[RequestRecord], segment: Segment) -> dict[str, NDArray[np.float64]]:
    counted = [request.request_id for request in segment.requests if request.request_id in segment.counted]
    place = {name: number for number, name in enumerate(counted)}
    found = {name: np.full(len(place), np.nan) for name in _LATENCIES}
    for record in records:
        if record.completed and record.request_id in place:
            number = place[record.request_id]
            for name, values in found.items():  # of several samples the last to end
                if (value := getattr(record, f"{name}_ms")) is not None:
                    values[number] = np.nanmax([values[number], round(value, _DIGITS)])
    return found


#: Work on tasks, which are keys: each result as it ends, in processes here or on other machines.
Spread = Callable[[Callable[[str], Outcome], Sequence[str]], Iterator[tuple[str, Outcome]]]


def here(cores: int) -> Spread:
    """In so many processes of this machine."""
    killed = "a process was killed, perhaps for memory: take fewer minutes=, or a workload.window"
    return partial(in_processes, processes=cores, killed=killed)


class Simulations:
    """What was simulated of today's configuration with other settings. `on_end` is told of each that ends. Where
    the file cannot be written, why is in `unwritten`, and the same command simulates again.
    """

    def __init__(
        self, config: RunConfig, file: Path, spread: Spread, on_end: Callable[[Outcome], None] = lambda _: None
    ) -> None:
        self.config, self._file, self._spread, self._on_end = config, file, spread, on_end
        self._known = _read(file)
        self._asked: dict[str, None] = {}  # in order, for the same sum of their work
        self.unwritten: list[OutputError] = []

    @property
    def count(self) -> int:
        """How many different ones were asked for, whether simulated now or before."""
        return len(self._asked)

    @property
    def work_s(self) -> float:
        """Of all that were asked for."""
        return sum(self._known[key].work_s for key in self._asked)

    def run(self, settings: Iterable[Settings], segment: Segment) -> list[Outcome]:
        """Their outcomes, in order. Raises CapacityError where a process was killed."""
        sorted_settings = [dict(sorted(setting.items())) for setting in settings]
        keys = [_key(setting, segment) for setting in sorted_settings]
        tasks = dict(zip(keys, sorted_settings, strict=True))
        missing = [key for key in tasks if key not in self._known]
        config = self.config  # alone: all that the work has goes with it to other machines
        for key, outcome in self._spread(lambda key: simulate(config, tasks[key], segment), missing):
            self._known[key] = outcome
            self._keep(key, outcome)
            self._on_end(outcome)
        self._asked |= dict.fromkeys(keys)
        return [self._known[key] for key in keys]

    def _keep(self, key: str, outcome: Outcome) -> None:
        if self.unwritten:
            return
        with attempt(self.unwritten), writing(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"task": key, **asdict(outcome)}, default=np.ndarray.tolist) + "\n")

    def one(self, settings: Settings, segment: Segment) -> Outcome:
        """A single one."""
        return self.run([settings], segment)[0]


def _key(settings: Settings, segment: Segment) -> str:
    return " ".join([*(as_word(name, value) for name, value in settings.items()), f"on {segment.name}"])


def _read(file: Path) -> dict[str, Outcome]:
    """Those of a file; a last line that was cut off, and lines of another version, are left out."""
    found: dict[str, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            values = json.loads(line)
            key, latencies = values.pop("task"), values.pop("latencies_ms")
            arrays = {name: np.array(each, dtype=np.float64) for name, each in latencies.items()}
            found[key] = Outcome(arrays, **values)
        except (ValueError, KeyError, TypeError):
            continue
    return found
