"""kvlab report: is B really faster than A? Runs side by side, with intervals over their repeats.

kvlab report outputs/2026-01-01/12-00-00.000000 outputs/2026-01-01/12-05-00.000000     two runs
kvlab report multirun/2026-01-01/12-30-00.000000       a sweep; its first point is the baseline
kvlab report 3f9c2a1b                                  a run or a sweep by its id, or how that begins
kvlab report before/ after/                            two sweeps of the same points
kvlab report run1,run2,run3 run4,run5,run6             two sets of repeats
kvlab report filter="params.`kv.backend` = 'paged'"    what the tracking store finds

Settings, in any order (tracking.uri, tracking.experiment and others choose the store, as for `kvlab run`):
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvlab.cli.settings import command, refuse_settings
from kvlab.errors import KvlabError, OutputError
from kvlab.lab.files import sentences
from kvlab.lab.report.options import ReportOptions
from kvlab.run_files import ADVICE, SEARCH

if TYPE_CHECKING:
    from kvlab.lab.compare.groups import Group
    from kvlab.lab.report.model import Report
    from kvlab.lab.results.records import RunRecord

VIOLATED = 3
#: What conf/run.yaml chooses.
_USUAL = ("engine=kvlab", "kv=paged", "scheduler=continuous", "attention=auto", "framework=vllm")


def report(options: ReportOptions, runs: Sequence[str]) -> tuple[Report, bool]:
    """Make the report, print it and write its files. Returns it, and whether all its files were written.

    Raises KvlabError for what the user can mend.
    """
    from kvlab.lab.report.pages import add_figures, write_report
    from kvlab.lab.report.report import build_report
    from kvlab.lab.report.sources import Sources
    from kvlab.lab.report.terminal import print_report
    from kvlab.lab.terminal import Terminal, warn

    console = Terminal()
    with tempfile.TemporaryDirectory(prefix="kvlab-report-", ignore_cleanup_errors=True) as folder:
        made = build_report(Sources(options, Path(), Path(folder)).resolve(runs), options)
        print_report(made, console)
        if options.figures:
            add_figures(made, options.metrics)
    errors: list[OutputError] = []
    page = write_report(made, _directory(options, runs), errors)
    warn(*sentences(errors))
    if not any(error.path == page for error in errors):
        console.print(f"report: {page}", soft_wrap=True)
    if line := _advice(made.groups, runs):
        console.print(line, soft_wrap=True)
    return made, not errors


def _advice(groups: Sequence[Group], runs: Sequence[str]) -> str | None:
    """How to go on: from the answer of a search, if the report is on one, else from the first group."""
    if len(runs) == 1 and (kept := Path(runs[0]) / SEARCH / ADVICE).is_file():
        return kept.read_text(encoding="utf-8")
    line = _advice_on(groups[0].example)
    return f"of {groups[0].name}, {line}" if line and len(groups) > 1 else line


def _advice_on(run: RunRecord) -> str | None:
    """The command that asks what to change of a run that was simulated; None: of another, and of one whose settings
    this version does not have.
    """
    if not run.simulated or not {"model", "workload", "hardware"} <= run.choices.keys():
        return None
    from kvlab.cli.compose import compose_run
    from kvlab.lab.advice_line import advice_line
    from kvlab.lab.settings import as_word, flatten, measured

    drawn = cast("int", run.config.get("workload.num_requests"))
    requests = None if run.config.get("workload.path") else drawn
    words = [f"{group}={choice}" for group, choice in run.choices.items() if group != "tracking"]
    if advice_line(words, requests) is None:
        return None
    try:
        usual = flatten(asdict(compose_run(words).config))
    except KvlabError:
        return None
    recorded = measured(run.config, any_repeat=True)
    others = [as_word(key, value) for key, value in recorded.items() if usual.get(key) != value]
    return advice_line([word for word in words if word not in _USUAL] + others, requests)


def _directory(options: ReportOptions, runs: Sequence[str]) -> Path:
    """Where the report goes: into the sweep that it is about, else into a folder of its own."""
    if options.output is not None:
        return Path(options.output)
    if len(runs) == 1 and Path(runs[0]).is_dir():
        return Path(runs[0]) / "report"
    return Path("outputs") / "reports" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")


@command(__doc__, ReportOptions, bare=False)
def main(options: ReportOptions, runs: list[str]) -> int:
    refuse_settings(ReportOptions, runs)
    made, complete = report(options, runs)
    return VIOLATED if made.violated else 0 if complete else 1
