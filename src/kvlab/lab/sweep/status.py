"""What a sweep prints before, while and after it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console

from kvlab.lab.progress import clock
from kvlab.lab.sweep.plan import SweepPlan
from kvlab.lab.sweep.results import best, medians, read_results
from kvlab.lab.tables import comparison_table, memory_sentence, points_table

_SIDE_BY_SIDE = 3  # more points than this get a row each instead of a column
_POLL_S = 0.5


def announcement(plan: SweepPlan, repeats: int, seconds: Sequence[float | None]) -> str:
    """How many jobs there are and how long they will take. `seconds`: of each job, None where unknown."""
    jobs, groups = len(plan.jobs), len({point.group for point in plan.points})
    text = f"{plan.name}: {_count(groups, 'point')}"
    if repeats > 1:
        text += f", {repeats} times each"
    if plan.done_before:
        text += f", {_count(len(plan.done_before), 'run')} done before"
    text += f": {_count(jobs, 'job')}"
    if plan.parallel != 1:
        text += f", {plan.parallel or 'all'} at once"
    if not jobs:
        return text
    known = [value for value in seconds if value is not None]
    if len(known) == jobs:
        parallel = min(plan.parallel or jobs, jobs)
        text += f", about {clock(sum(known) / parallel)} by earlier runs of the same model and workload"
    else:
        text += ", time unknown until the first is done (no earlier run of this model and workload is tracked)"
    return text


class SweepProgress:
    """Prints the progress of a sweep from the results in its directory, which any process can write."""

    def __init__(self, directory: Path, plan: SweepPlan, console: Console) -> None:
        self._directory, self._plan, self._console = directory, plan, console
        self._reported = 0

    def report(self) -> None:
        """Print a line, if more jobs are done than at the last call."""
        jobs = self._plan.jobs
        done = sum((self._directory / job.directory / "summary.json").exists() for job in jobs)
        if done == self._reported:
            return
        self._reported = done
        line = f"{done} of {len(jobs)} jobs done"
        results = read_results(self._directory, self._plan)
        leader = best(results, self._plan.optimize)
        if leader:
            line += f", best so far {leader}"
        # What failed or did not fit took no time; a run that had finished before took none of this sweep's.
        ran = sum(result["status"] == "finished" for result in results) - len(self._plan.done_before)
        if done < len(jobs) and ran > 0:
            passed = time.time() - self._plan.started
            line += f", about {clock(passed / ran * (len(jobs) - done))} left"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


class Watch:
    """Reports the progress of jobs in other processes until it is left. Use as a context manager."""

    def __init__(self, progress: SweepProgress) -> None:
        self._progress = progress
        self._done = Event()
        self._thread = Thread(target=self._poll, name="sweep progress", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._progress.report()

    def _poll(self) -> None:
        while not self._done.wait(_POLL_S):
            self._progress.report()


def print_results(results: Sequence[dict[str, Any]], plan: SweepPlan | None, console: Console) -> None:
    """The table at the end, what failed, the best point."""
    rows = medians(results)
    console.rule(style="dim")
    if len(rows) > _SIDE_BY_SIDE:
        console.print(points_table(rows))
    else:
        side_by_side = [(row["name"], row["metrics"]) for row in rows]
        console.print(comparison_table(side_by_side))
        if sentence := memory_sentence(side_by_side):
            console.print(f"\n{sentence}", highlight=False, markup=False)
    before = {point.name for point in plan.done_before} if plan else set()
    ended = {(result["group"], result["status"].replace("_", " "), result["error"]) for result in results}
    for group, status, error in sorted((found for found in ended if found[2]), key=str):
        console.print(f"{group}: {status}: {error}", highlight=False, soft_wrap=True, markup=False)
    counts = {status: sum(result["status"] == status for result in results) for status in _WORDS}
    text = ", ".join(f"{count} {_WORDS[status]}" for status, count in counts.items() if count)
    if before:
        text += f"; {len(before)} of them done before"
    console.print(f"\n{_count(len(results), 'run')}: {text}", highlight=False, soft_wrap=True)
    leader = best(results, plan.optimize if plan else None)
    if leader and len(rows) > 1:
        console.print(f"best: {leader}", highlight=False, soft_wrap=True, markup=False)


_WORDS = {
    "finished": "finished",
    "out_of_memory": "did not fit in memory",
    "failed": "failed",
    "interrupted": "interrupted or not run",
}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
