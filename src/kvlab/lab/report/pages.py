"""A report's files: one HTML page that needs nothing beside it, Markdown, and the figures that the latter shows."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.errors import ConfigError
from kvlab.lab.catalogue import SPEED, TIME, metric
from kvlab.lab.compare.groups import Group
from kvlab.lab.report.model import Cell, Image, Report, Row
from kvlab.lab.report.rows import value_text

_TEMPLATE = "report.html.j2"
_FACTS = ("machine", "device", "threads", "attention", "kernels", "workload_digest", "run_id", "started")


def write_report(report: Report, directory: Path) -> Path:
    """Write report.html, report.md and the images that the latter shows. Returns the page's path.

    Raises ConfigError where nothing can be written.
    """
    shown = []
    try:
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(report.images):
            stem = re.sub(r"[^\w.=-]+", "_", image.group or "all")[:60]
            file = Path("figures") / f"{number:02d}-{image.name}-{stem}.png"
            (directory / file).write_bytes(image.png)
            shown.append((f"{image.name}: {image.caption}", file))
        (directory / "report.md").write_text(to_markdown(report, shown), encoding="utf-8")
        page = directory / "report.html"
        page.write_text(to_html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", directory, f"cannot be written: {error.strerror or error}") from error
    return page


@dataclass(frozen=True, slots=True)
class Strip:
    """A metric's runs as dots: for each group their positions on the scale, 0 to 100, and that of the median."""

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
        sections=[(name, list(rows)) for name, rows in groupby(report.rows, key=lambda row: row.section)],
        strips=_strips(report),
        figures=_by_figure(report.images),
        configurations=[(group, group.example.config, _facts(group)) for group in report.groups],
        plotly=script,
    )


def to_markdown(report: Report, figures: Iterable[tuple[str, Path]] = ()) -> str:
    """The report; `figures` are captions and paths of PNG files, relative to where the text will lie."""
    parts = [f"# {_plain(report.title)}", *report.headlines]
    names = [_plain(group.name) for group in report.groups]
    if report.differences:
        rows = [[difference.key, *difference.values] for difference in report.differences]
        parts += ["## What differs", _table(["key", *names], rows)]
    parts += ["## Medians", _medians(report, names)]
    if report.outputs:
        parts += ["## Greedy outputs", _list(f"{name}: {text}" for name, text in report.outputs)]
    if report.findings:
        found = (f"**{'failed' if f.violated else 'passed'}**: {f.sentence}" for f in report.findings)
        parts += ["## Gate", _list(found)]
    if report.warnings:
        parts += ["## Warnings", _list(report.warnings)]
    parts += ["## How it was computed", _list(report.method)]
    shown = [f"![{caption}]({path.as_posix()})" for caption, path in figures]
    if shown or report.left_out:
        parts += ["## Figures", *shown]
    if report.left_out:
        parts.append(_list(report.left_out))
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> Any:
    """Text in which `this` is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _strips(report: Report) -> list[Strip]:
    """Dots of times and rates; none where every group has one run."""
    if max(len(group.runs) for group in report.groups) < 2:
        return []
    shown = [row for row in report.rows if metric(row.metric).direction in (SPEED, TIME)]
    return [strip for row in shown if (strip := _strip(report.groups, row))]


def _strip(groups: Sequence[Group], row: Row) -> Strip | None:
    values = [value for cell in row.cells for value in cell.dots]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return None

    def position(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    dots = tuple(
        (group.name, tuple(map(position, cell.dots)), position(median(cell.dots or (low,))))
        for group, cell in zip(groups, row.cells, strict=True)
    )
    entry = metric(row.metric)
    return Strip(row.label, value_text(entry, low), value_text(entry, high), dots)


def _by_figure(images: Sequence[Image]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Captions and data by figure, so that the same figure of two groups stand beside each other."""
    found: dict[str, list[tuple[str, str]]] = {}
    for image in images:
        shown = (image.caption, base64.b64encode(image.png).decode())
        found.setdefault(image.name.replace("_", " "), []).append(shown)
    return list(found.items())


def _facts(group: Group) -> dict[str, Any]:
    facts = group.example.facts
    return {key: facts[key] for key in _FACTS if key in facts} | dict(facts.get("environment", {}))


def _medians(report: Report, names: Sequence[str]) -> str:
    headings = [f"{name} ({len(group.runs)})" for name, group in zip(names, report.groups, strict=True)]
    if len(report.groups) != 2:
        rows = [[row.label, *(_cell(cell) for cell in row.cells)] for row in report.rows]
        return _table(["", *headings], rows)
    rows = []
    for row in report.rows:
        first, second = row.cells
        rows.append([row.label, first.value, second.value, second.delta, second.interval, _word(second)])
    return _table(["", *headings, "delta", "interval", "verdict"], rows)


def _cell(cell: Cell) -> str:
    return " ".join(text for text in (cell.value, f"({cell.delta})" if cell.delta else "", _word(cell)) if text)


def _word(cell: Cell) -> str:
    return f"**{cell.word}**" if cell.tone in ("good", "bad") else cell.word


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(_plain(text) for text in line) + " |" for line in lines)


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
