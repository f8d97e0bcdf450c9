"""A sweep as it was planned: its points in order. Kept as sweep.json, where every point's process reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.lab.sweep.process import this_process

FILE = "sweep.json"


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: what sets it apart, and where its results are."""

    name: str  # with its repeat, where there are several
    group: str  # without
    digest: str
    directory: str = ""  # within the sweep's; the number of the job, for those that are to run
    settings: dict[str, str] = field(default_factory=dict)  # of the keys that are swept
    repeat: int = 0
    done_before: str | None = None  # the run in the tracking store that had finished already


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep is to do. `varied` are the swept keys with their values as they were written."""

    name: str
    digest: str
    varied: dict[str, str]
    optimize: str | None
    process: str  # the one that started it
    started: float  # seconds since 1970
    parent_run_id: str | None = None
    parallel: int = 1  # jobs at once; 0: all
    points: list[Point] = field(default_factory=list)

    @property
    def jobs(self) -> list[Point]:
        """The points that are to run, in order."""
        return [point for point in self.points if point.done_before is None]

    @property
    def done_before(self) -> list[Point]:
        """The points that had finished already."""
        return [point for point in self.points if point.done_before is not None]

    def write(self, directory: Path) -> None:
        """Keep it in the sweep's directory."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_plan(directory: Path) -> SweepPlan | None:
    """The plan in a sweep's directory; None where there is none."""
    file = directory / FILE
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    return SweepPlan(**{**values, "points": [Point(**point) for point in values["points"]]})


@dataclass(frozen=True, slots=True)
class Job:
    """What a run of a sweep has to know of the sweep, in whichever process it is made."""

    name: str = "run"
    heading: str = "run"
    parent_run_id: str | None = None
    in_sweep_process: bool = False  # whether this process started the sweep


def find_job(sweep: Path, directory: str, overrides: Sequence[str]) -> Job:
    """The job of the sweep in `sweep` whose results go to its folder `directory`."""
    plan = read_plan(sweep)
    if plan is None:
        return Job()
    here = plan.process == this_process()
    for number, point in enumerate(plan.jobs, 1):
        if point.directory == directory:
            heading = f"job {number} of {len(plan.jobs)}: {point.name}"
            return Job(point.name, heading, plan.parent_run_id, here)
    # Another sweeper chooses the points one by one.
    name = " ".join(text for text in overrides if text.split("=")[0] in plan.varied) or "run"
    return Job(name, name, plan.parent_run_id, here)
