"""A report as one HTML file that needs nothing beside it: no network, no folder of pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvlab.lab.catalogue import SPEED, TIME, metric
from kvlab.lab.compare.groups import Group
from kvlab.lab.report.metrics import value_text
from kvlab.lab.report.model import Line, Picture, Report

_TEMPLATE = "report.html.j2"
_FACTS = ("machine", "device", "threads", "attention", "kernels", "workload_digest", "run_id", "started")


@dataclass(frozen=True, slots=True)
class Strip:
    """A metric's runs as dots: for each group the places along the line, 0 to 100, and the middle one."""

    label: str
    low: str
    high: str
    groups: tuple[tuple[str, tuple[float, ...], float], ...]


def to_html(report: Report) -> str:
    """The report's page. plotly.js, 4.7 MB, is within it where a figure needs it."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["code"] = _code
    script = ""
    if report.interactive:
        from plotly.offline import get_plotlyjs

        script = get_plotlyjs()
    return environment.get_template(_TEMPLATE).render(
        report=report,
        sections=[(name, list(lines)) for name, lines in groupby(report.lines, key=lambda line: line.section)],
        strips=_strips(report),
        pictures=_pictures(report.pictures),
        configurations=[(group, _settings(group), _facts(group)) for group in report.groups],
        plotly=script,
    )


def _code(text: str) -> Any:
    """Text in which `this` is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _strips(report: Report) -> list[Strip]:
    """Dots of times and rates; none where every group has one run."""
    if max(len(group.runs) for group in report.groups) < 2:
        return []
    shown = [line for line in report.lines if metric(line.metric).direction in (SPEED, TIME)]
    return [strip for line in shown if (strip := _strip(report.groups, line))]


def _strip(groups: Sequence[Group], line: Line) -> Strip | None:
    values = [value for cell in line.cells for value in cell.dots]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return None

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    rows = []
    for group, cell in zip(groups, line.cells, strict=True):
        ordered = sorted(cell.dots)
        middle = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2 if ordered else 0.0
        rows.append((group.name, tuple(place(value) for value in cell.dots), place(middle)))
    entry = metric(line.metric)
    return Strip(line.label, value_text(entry, low), value_text(entry, high), tuple(rows))


def _pictures(pictures: Sequence[Picture]) -> list[tuple[str, list[tuple[str, str]]]]:
    """By figure, so that the same figure of two groups stand beside each other: captions and data."""
    names = dict.fromkeys(picture.name for picture in pictures)
    return [
        (
            name.replace("_", " "),
            [(p.group or "all runs", base64.b64encode(p.png).decode()) for p in pictures if p.name == name],
        )
        for name in names
    ]


def _settings(group: Group) -> Mapping[str, object]:
    return group.example.config


def _facts(group: Group) -> dict[str, Any]:
    facts = {key: group.example.facts[key] for key in _FACTS if key in group.example.facts}
    return facts | dict(group.example.facts.get("environment", {}))
