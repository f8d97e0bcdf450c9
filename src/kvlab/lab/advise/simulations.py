"""The simulations of advice: each once, on several cores, kept in a file from which the same command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlab.config import RunConfig
from kvlab.lab.advise.outcome import Outcome, Settings, simulate
from kvlab.lab.advise.segments import Segment
from kvlab.lab.processes import in_processes
from kvlab.lab.settings import as_word

_ARRAYS = ("ttft_ms", "tpot_ms", "e2el_ms")
_DIGITS = 6  # of a latency in ms: those of a file are those of a simulation


class Task(NamedTuple):
    """Other settings on a segment, by its name."""

    settings: tuple[tuple[str, Any], ...]
    segment: str

    @classmethod
    def of(cls, settings: Settings, segment: Segment) -> Task:
        """Equal for equal settings, in whatever order."""
        return cls(tuple(sorted(settings.items())), segment.name)

    @property
    def key(self) -> str:
        """As text."""
        return " ".join([as_word(name, value) for name, value in self.settings] + [f"on {self.segment}"])


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
        tasks = [Task.of(each, segment) for each in settings]
        missing = list(dict.fromkeys(task for task in tasks if task.key not in self._known))

        def work(task: Task) -> Outcome:
            return _rounded(simulate(self.config, dict(task.settings), segment))

        killed = "a process was killed, perhaps for memory: take fewer minutes=, or a workload.window"
        for task, outcome in in_processes(work, missing, self.cores, killed=killed):
            self._known[task.key] = outcome
            self._append(task, outcome)
            self.on_end(outcome)
        for task in dict.fromkeys(tasks):
            if task.key not in self._done:
                self._done.add(task.key)
                self.work_s += self._known[task.key].work_s
        return [self._known[task.key] for task in tasks]

    def one(self, settings: Settings, segment: Segment) -> Outcome:
        """A single one."""
        return self.run([settings], segment)[0]

    def _append(self, task: Task, outcome: Outcome) -> None:
        values = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
        values |= {name: [None if np.isnan(v) else v for v in values[name].tolist()] for name in _ARRAYS}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"task": task.key, **values}) + "\n")


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
