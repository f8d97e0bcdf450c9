"""How a sweep ends: its results in one table, its parent run closed, an exit code."""

from __future__ import annotations

import sys
from contextlib import suppress

from kvlab.cli.resuming import earlier_runs
from kvlab.cli.sweep_opening import Sweep
from kvlab.errors import KvlabError, TrackingError


def sum_up(sweep: Sweep) -> int:
    """Show and keep what the runs of a sweep came to, and close its parent run. Returns the exit code."""
    from rich.console import Console

    from kvlab.lab.sweep.pictures import draw_sweep
    from kvlab.lab.sweep.results import metric_names, read_results, status_of, with_missing, write_csv
    from kvlab.lab.sweep.status import print_results
    from kvlab.lab.tracking import RunStatus

    plan = sweep.plan if sweep.plan.points else None
    found = read_results(sweep.directory, plan)
    missing = RunStatus.INTERRUPTED if sweep.interrupted else RunStatus.FAILED
    results = with_missing(found, plan, missing)
    print_results(results, plan, Console())
    for problem in sweep.problems:
        print(f"the launcher failed: {problem}", file=sys.stderr)
    names, wanted = metric_names(results), sweep.plan.optimize
    unknown = bool(wanted) and wanted not in names
    if unknown and names:
        print(f"error: optimize={wanted}: no run has it; there are: {', '.join(names)}", file=sys.stderr)
    status = RunStatus.INTERRUPTED if sweep.interrupted else status_of(results)
    report = sweep.directory / "report"
    write_csv(results, report / "sweep.csv")
    if sweep.figures and plan is not None and len(found) > 1:
        warning = draw_sweep([sweep.directory / point.directory for point in plan.points], report)
        print(f"warning: {warning}" if warning else f"pictures: {report}")
    if sweep.tracking_error is None:
        try:
            sweep.tracker.log_artifacts(report)
            sweep.tracker.finish(status)
            print(sweep.tracker.where())
        except TrackingError as error:
            sweep.tracking_error = str(error)
            print(f"warning: {error}", file=sys.stderr)
    if sweep.interrupted or sweep.problems:
        _close_open_runs(sweep)
    print(f"results: {sweep.directory}")
    if status is RunStatus.INTERRUPTED:
        if sweep.tracker.run_id:
            print("the same command with resume=true runs the rest")
        return 130
    return 1 if status is RunStatus.FAILED or sweep.tracking_error or unknown else 0


def _close_open_runs(sweep: Sweep) -> None:
    """Workers that were ended with the sweep had no time to close their runs."""
    if sweep.tracker.run_id is None:
        return
    with suppress(KvlabError):
        earlier, _ = earlier_runs(sweep.tracking, resume=False)
        parent = earlier and earlier.parent("sweep", sweep.plan.digest)
        if earlier and parent and parent.run_id == sweep.tracker.run_id:
            earlier.close_abandoned(parent)
