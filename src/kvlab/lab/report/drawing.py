"""The figures of a report: of every group one run, and of all runs together."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

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

    runs = [run for group in report.groups for run in (*group.runs, *group.left_out)]
    if len(report.groups) > 1:
        named = [row.metric for row in report.rows if row.metric in wanted][:_METRICS]
        drawn = figures.sweep_figures(runs, named)
        report.images += [Image(name, None, _png(figure)) for name, figure in drawn.items()]
        for name, interactive in figures.interactive_sweep(runs).items():
            report.interactive.append((figures.title_of(name), embedded(interactive)))
    for number, group in enumerate([group for group in report.groups if group.members][:_GROUPS]):
        drawn = figures.run_figures(group.example)
        report.images += [Image(name, group.name, _png(figure)) for name, figure in drawn.items()]
        report.left_out += [
            f"{group.name}: no {figures.title_of(name)}: {reason}."
            for name, reason in figures.left_out(group.example).items()
        ]
        if number < _INTERACTIVE_GROUPS:
            for name, interactive in figures.interactive_run(group.example).items():
                title = f"{figures.title_of(name)}: {group.name}"
                report.interactive.append((title, embedded(interactive)))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
