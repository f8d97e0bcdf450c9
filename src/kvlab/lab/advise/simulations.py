"""The simulations of advice: each once, on several cores, kept in a file from which the same command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import numpy as np

from kvlab.config import RunConfig
from kvlab.lab.advise.outcome import Outcome, Settings, simulate
from kvlab.lab.advise.segments import Segment
from kvlab.lab.processes import in_processes
from kvlab.lab.settings import as_word

_ARRAYS = ("ttft_ms", "tpot_ms", "e2el_ms")
_DIGITS = 6  # of a latency in ms: those of a file are those of a simulation


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
            return _rounded(simulate(self.config, tasks[key], segment))

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


def _rounded(outcome: Outcome) -> Outcome:
    for name in _ARRAYS:
        getattr(outcome, name)[:] = np.round(getattr(outcome, name), _DIGITS)
    return outcome
