"""What a sweep prints before, while and after it runs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from kvlab.lab.campaigns.sweep.plan import SweepPlan
from kvlab.lab.campaigns.sweep.results import best, medians, read_results
from kvlab.lab.results.records import simulated_on
from kvlab.lab.results.sureness import how_far_off
from kvlab.lab.results.tables import comparison_table, count, memory_sentence, points_table
from kvlab.lab.run.progress import clock
from kvlab.lab.terminal import Terminal
from kvlab.run_files import SUMMARY

_SIDE_BY_SIDE = 3  # more points than this get a row each instead of a column
_POLL_S = 0.5
_WORDS = {
    "finished": "finished",
    "out_of_memory": "did not fit in memory",
    "failed": "failed",
    "interrupted": "interrupted or not run",
}


def announcement(plan: SweepPlan, seconds: Sequence[float | None]) -> str:
    """How many jobs there are and how long they will take. `seconds`: of each job, None where unknown."""
    jobs, groups = len(plan.jobs), len({point.group for point in plan.points})
    text = f"{plan.name}: {count(groups, 'point')}"
    if plan.repeats > 1:
        text += f", {plan.repeats} times each"
    if plan.done_before:
        text += f", {count(len(plan.done_before), 'run')} done before"
    text += f": {count(jobs, 'job')}"
    if plan.parallel != 1:
        text += f", {plan.parallel or 'all'} at once"
    if not jobs:
        return text
    known = [value for value in seconds if value is not None]
    if len(known) < jobs:
        return (
            f"{text}, time unknown until the first is done (no earlier run of this model and workload is tracked)"
        )
    expected = sum(known) / min(plan.parallel or jobs, jobs)
    return f"{text}, about {clock(expected)} by earlier runs of the same model and workload"


class SweepProgress:
    """Prints the progress of a sweep from the results in its directory, which any process can write."""

    def __init__(self, directory: Path, plan: SweepPlan) -> None:
        self._directory, self._plan = directory, plan
        self._reported = 0

    def report(self) -> None:
        """Print a line, if more jobs are done than at the last call."""
        jobs = self._plan.jobs
        done = sum((self._directory / job.directory / SUMMARY).exists() for job in jobs)
        if done == self._reported:
            return
        self._reported = done
        line = f"{done} of {len(jobs)} jobs done"
        results = read_results(self._directory, self._plan)
        if leader := best(results, self._plan.optimize):
            line += f", best so far {leader}"
        # A job that failed or did not fit took no time; a run that was done before took none of this sweep's.
        ran = sum(result["status"] == "finished" for result in results) - len(self._plan.done_before)
        if done < len(jobs) and ran > 0:
            line += f", about {clock((time.time() - self._plan.started) / ran * (len(jobs) - done))} left"
        print(line, flush=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Report the jobs of other processes as they end."""
        left = Event()

        def poll() -> None:
            while not left.wait(_POLL_S):
                self.report()

        thread = Thread(target=poll, name="sweep progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
            self.report()


def print_results(results: Sequence[dict[str, Any]], plan: SweepPlan) -> None:
    """The table at the end, what failed, the best point."""
    rows, console = medians(results), Terminal()
    console.rule(style="dim")
    if len(rows) > _SIDE_BY_SIDE:
        console.print(points_table(rows, console.width, plan.optimize))
    else:
        side_by_side = [(row["name"], row["metrics"]) for row in rows]
        console.print(comparison_table(side_by_side, brief=True))
        if sentence := memory_sentence(side_by_side):
            console.print(f"\n{sentence}")
    if simulated := sorted({simulated_on(result) for result in results} - {""}):
        console.print(f"\nNothing was computed: {'; '.join(simulated)}.")
    if text := how_far_off(results, compared=len(rows) > 1):
        console.print(text, style="dim")
    for result in {(result["group"], result["error"]): result for result in results if result["error"]}.values():
        print(f"{result['group']}: {result['status'].replace('_', ' ')}: {result['error']}")
    counts = {status: sum(result["status"] == status for result in results) for status in _WORDS}
    text = ", ".join(f"{count} {_WORDS[status]}" for status, count in counts.items() if count)
    if plan.done_before:
        text += f"; {len(plan.done_before)} of them done before"
    print(f"\n{count(len(results), 'run')}: {text}")
    leader = best(results, plan.optimize)
    if leader and len(rows) > 1:
        print(f"best: {leader}")
