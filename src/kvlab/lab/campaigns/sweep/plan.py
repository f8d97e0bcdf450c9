"""A sweep as it was planned: its points in order. Kept as sweep.json, where every point's process reads it."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvlab.lab.files import write_text
from kvlab.lab.tracking.process import this_process

FILE = "sweep.json"
_written: dict[Path, SweepPlan] = {}


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: what sets it apart, and where its results are."""

    name: str  # with its repeat, where there are several
    group: str  # without
    digest: str  # of its configuration
    directory: str = ""  # within the sweep's; the number of the job, for those that are to run
    settings: dict[str, str] = field(default_factory=dict)  # of the keys that are swept
    repeat: int = 0
    done_before: str | None = None  # the run in the tracking store that had finished already


class Job(NamedTuple):
    """What a run of a sweep has to know of the sweep, in whichever process it runs."""

    name: str
    heading: str
    parent_run_id: str | None
    in_sweep_process: bool  # whether this process started the sweep


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep is to do. `varied` are the swept keys with their values as they were written."""

    name: str
    digest: str
    varied: dict[str, str]
    optimize: str | None
    process: str = field(default_factory=this_process)  # the one that started it
    started: float = field(default_factory=time.time)  # seconds since 1970
    parent_run_id: str | None = None
    parallel: int = 1  # jobs at once; 0: all
    repeats: int = 1
    points: list[Point] = field(default_factory=list)

    @property
    def jobs(self) -> list[Point]:
        """The points that are to run, in order."""
        return [point for point in self.points if point.done_before is None]

    @property
    def done_before(self) -> list[Point]:
        """The points that had finished already."""
        return [point for point in self.points if point.done_before is not None]

    def job(self, directory: str) -> Job:
        """The job whose results go to this folder of the sweep."""
        jobs = self.jobs
        number = [job.directory for job in jobs].index(directory)
        name = jobs[number].name
        heading = f"job {number + 1} of {len(jobs)}: {name}"
        return Job(name, heading, self.parent_run_id, self.process == this_process())

    def write(self, directory: Path) -> None:
        """Keep it in the sweep's directory. Raises OutputError."""
        _written[directory] = self
        write_text(directory / FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def read_plan(directory: Path) -> SweepPlan:
    """The plan in a sweep's directory, or that this process wrote there. Raises OSError where there is none."""
    try:
        values = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except OSError:  # removed since
        if (plan := _written.get(directory.resolve())) is not None:
            return plan
        raise
    return SweepPlan(**{**values, "points": [Point(**point) for point in values["points"]]})
