"""The pictures of a report: of every group one run, and of all runs together."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.lab.report.model import Picture, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GROUPS = 6  # groups that get pictures of their own; more would bury the report
_METRICS = 4  # metrics that get a picture because they were asked for
_HOVER_GROUPS = 2  # groups with interactive figures: the baseline and the first beside it


def add_pictures(report: Report, wanted: Sequence[str] = ()) -> None:
    """Draw what `kvlab.lab.figures` offers into the report. A group is shown by its first finished run.

    Metrics that were asked for by name are drawn over what was varied, the first few of them.
    """
    from kvlab.lab import figures  # here: Matplotlib and Plotly take a second

    runs = [run for group in report.groups for run in (*group.runs, *group.left_out)]
    if len(report.groups) > 1:
        report.pictures += [
            Picture(name, None, _png(figure))
            for name, figure in figures.sweep_figures(runs, _named(report, wanted)).items()
        ]
        report.interactive += [(_words(name), _html(f)) for name, f in figures.interactive_sweep(runs).items()]
    groups = [group for group in report.groups if group.members]
    for group in groups[:_GROUPS]:
        for name, figure in figures.run_figures(group.example).items():
            report.pictures.append(Picture(name, group.name, _png(figure)))
    for group in groups[:_HOVER_GROUPS]:
        shown = figures.interactive_run(group.example).items()
        report.interactive += [(f"{_words(name)}: {group.name}", _html(figure)) for name, figure in shown]


def _named(report: Report, wanted: Sequence[str]) -> list[str]:
    return [line.metric for line in report.lines if line.metric in wanted][:_METRICS]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _html(figure: Any) -> str:
    options = {"responsive": True, "displaylogo": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=options))


def _words(name: str) -> str:
    return name.replace("_", " ")
