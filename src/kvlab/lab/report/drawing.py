"""The figures of a report: of every group one run, and of all runs together."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab.lab.report.model import Image, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GROUPS = 6  # groups that get figures of their own; more would bury the report
_METRICS = 4  # metrics that get a figure because they were asked for
_INTERACTIVE_GROUPS = 2  # groups with interactive figures: the baseline and the first beside it


def add_figures(report: Report, wanted: Sequence[str] = ()) -> None:
    """Draw what `kvlab.lab.figures` offers into the report. A group is shown by its first finished run.

    Metrics that were asked for by name are drawn over what was varied, the first few of them.
    """
    from kvlab.lab import figures  # here: Matplotlib and Plotly take a second
    from kvlab.lab.figures.interactive import embedded

    def add(group: str | None, drawn: Mapping[str, Figure], interactive: Mapping[str, Any]) -> None:
        for name, figure in drawn.items():
            figure.savefig(file := io.BytesIO(), format="png")
            report.images.append(Image(name, group, file.getvalue()))
        for name, figure in interactive.items():
            title = figures.title_of(name) + (f": {group}" if group else "")
            report.interactive.append((title, embedded(figure, len(report.interactive))))

    if len(report.groups) > 1:
        runs = [run for group in report.groups for run in (*group.runs, *group.left_out)]
        named = [row.metric for row in report.rows if row.metric in wanted][:_METRICS]
        add(None, figures.sweep_figures(runs, named), figures.interactive_sweep(runs))
    for number, group in enumerate([group for group in report.groups if group.runs][:_GROUPS]):
        run = group.example
        interactive = figures.interactive_run(run) if number < _INTERACTIVE_GROUPS else {}
        add(group.name, figures.run_figures(run), interactive)
        for name, reason in figures.left_out(run).items():
            report.left_out.append(f"{group.name}: no {figures.title_of(name)}: {reason}.")
