"""python -m src.report: is B really faster than A? Runs side by side, with intervals over their repeats.

python -m src.report outputs/2026-01-01/12-00-00.000000 outputs/2026-01-01/12-05-00.000000     two runs
python -m src.report multirun/2026-01-01/12-30-00.000000       a sweep; its first point is the baseline
python -m src.report 3f9c2a1b                                  a run or a sweep by its id, or how that begins
python -m src.report before/ after/                            two sweeps of the same points
python -m src.report run1,run2,run3 run4,run5,run6             two sets of repeats
python -m src.report filter="params.`kv.backend` = 'paged'"    what the tracking store finds

Settings, in any order:
  by=kv.backend,kv.dtype     what is compared; runs alike in these are a group (a key, a group such as kv, tags.x,
                             or set: the argument they came with). Without it, runs of one configuration are
  baseline=NAME              the group that the others are compared with; without it, the first
  metrics=a,b                names, patterns such as "latency/*", or all; the first four names get a figure each
  fail_if="throughput/output_tokens_per_s < -5%"   exit code 3 if the median is that far from the baseline's
  fail_if="latency/ttft_ms_p99 > 500"              or if its value is; several: joined by commas, or repeated
  confidence=95              of the intervals, in percent
  min_effect=1               in percent; a verdict other than `same` needs the whole interval beyond it
  force=true                 compare although the work was not the same
  figures=false              without figures, which take seconds
  output=DIR                 where report.html and report.md go
  tracking.uri=, tracking.experiment=, tracking.timeout_s=   the store, as for src.run
"""

from __future__ import annotations

import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.commands import run_command

if TYPE_CHECKING:
    from kvlab.lab.report.model import Report
    from kvlab.lab.report.options import ReportOptions

VIOLATED = 3


def report(arguments: list[str]) -> Report:
    """Make the report, print it and write its files. Raises KvlabError for what the user can mend."""
    from rich.console import Console

    from kvlab.lab.report.build import build_report
    from kvlab.lab.report.drawing import add_figures
    from kvlab.lab.report.options import parse_options
    from kvlab.lab.report.pages import write_report
    from kvlab.lab.report.sources import Sources
    from kvlab.lab.report.terminal import print_report

    options = parse_options(arguments)
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
    if len(sys.argv) == 1:
        print(__doc__)
        sys.exit(2)
    run_command(__doc__, lambda arguments: VIOLATED if report(arguments).violated else 0)


if __name__ == "__main__":
    main()
