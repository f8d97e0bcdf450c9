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
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import read_settings, run_command, setting, unknown_setting
from kvlab.config import TrackingConfig
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.report.model import Report
    from kvlab.lab.report.options import ReportOptions

VIOLATED = 3


@dataclass
class ReportSettings:
    """The settings of a report, as they are written."""

    filter: list[str] = setting([], "runs that the tracking store finds", "\"params.`kv.backend` = 'paged'\"")
    by: list[str] = setting(
        [],
        "what is compared: a key, a group such as kv, tags.x, or set, the argument that runs came with",
        "KEY,KEY",
    )
    baseline: str | None = setting(None, "the group that the others are compared with; else the first", "NAME")
    metrics: list[str] = setting([], 'names, patterns such as "latency/*", or all; four get a picture', "A,B")
    fail_if: list[str] = setting(
        [],
        'exit code 3 if "METRIC < -5%" of the baseline\'s, or "METRIC > 500" (joined by commas, or repeated)',
        "IF",
    )
    confidence: float = setting(95.0, "of the intervals, in percent", "95")
    min_effect: float = setting(1.0, "in percent; any verdict but `same` needs the whole interval beyond it", "1")
    force: bool = setting(False, "compare although the work was not the same", "true")
    figures: bool = setting(True, "without pictures, which take seconds", "false")
    output: str | None = setting(None, "where report.html and report.md go", "DIR")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if not 50 <= self.confidence < 100:
            raise ConfigError("confidence", f"{self.confidence:g}", "must be at least 50, and less than 100")
        if not self.min_effect >= 0:
            raise ConfigError("min_effect", f"{self.min_effect:g}", "must be at least 0")


def read_options(arguments: Sequence[str]) -> ReportOptions:
    """What a command line asks for: settings and, between them, runs. Raises ConfigError."""
    from kvlab.lab.compare.gate import parse_conditions
    from kvlab.lab.report.options import ReportOptions

    settings, runs = read_settings(ReportSettings, arguments)
    for run in runs:
        key, equals, _ = run.partition("=")
        if equals and "/" not in key and not Path(run).exists():
            raise unknown_setting(ReportSettings, run)
    return ReportOptions(
        runs=tuple(runs),
        filters=tuple(settings.filter),
        by=tuple(settings.by),
        metrics=tuple(settings.metrics),
        baseline=settings.baseline,
        conditions=tuple(condition for text in settings.fail_if for condition in parse_conditions(text)),
        output=Path(settings.output) if settings.output else None,
        force=settings.force,
        confidence=settings.confidence,
        min_effect=settings.min_effect / 100,
        figures=settings.figures,
        tracking=settings.tracking,
    )


def report(options: ReportOptions) -> Report:
    """Make the report, print it and write its files. Raises KvlabError for what the user can mend."""
    from rich.console import Console

    from kvlab.lab.report.build import build_report
    from kvlab.lab.report.drawing import add_figures
    from kvlab.lab.report.pages import write_report
    from kvlab.lab.report.sources import Sources
    from kvlab.lab.report.terminal import print_report

    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvlab-report-") as folder:
        made = build_report(Sources(options, Path(), Path(folder)).resolve(), options)
        print_report(made, console)
        if options.figures:
            add_figures(made, options.metrics)
    page = write_report(made, _directory(options))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    return made


def _directory(options: ReportOptions) -> Path:
    """Where the report goes: into the sweep that it is about, else into a folder of its own."""
    if options.output is not None:
        return options.output
    if len(options.runs) == 1 and Path(options.runs[0]).is_dir():
        return Path(options.runs[0]) / "report"
    return Path("outputs") / "reports" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")


def main() -> None:
    """Run the command line."""
    run_command(__doc__, ReportSettings, _answer, bare=False)


def _answer(arguments: list[str]) -> int:
    return VIOLATED if report(read_options(arguments)).violated else 0


if __name__ == "__main__":
    main()
