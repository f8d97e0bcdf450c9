"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvlab.lab.report.model import Cell, Report


def to_markdown(report: Report, pictures: Iterable[tuple[str, Path]] = ()) -> str:
    """The report; `pictures` are captions and paths of PNG files, relative to where the text will lie."""
    parts = [f"# {_plain(report.title)}", *report.headlines]
    names = [_plain(group.name) for group in report.groups]
    if report.differences:
        rows = [[difference.key, *difference.values] for difference in report.differences]
        parts += ["## What differs", _table(["key", *names], rows)]
    parts += ["## Medians", _figures(report, names)]
    if report.outputs:
        parts += ["## Greedy outputs", _list(f"{name}: {text}" for name, text in report.outputs)]
    if report.findings:
        said = (f"**{'failed' if f.violated else 'passed'}**: {f.sentence}" for f in report.findings)
        parts += ["## Gate", _list(said)]
    if report.warnings:
        parts += ["## Warnings", _list(report.warnings)]
    parts += ["## How it was computed", _list(report.method)]
    shown = [f"![{caption}]({path.as_posix()})" for caption, path in pictures]
    if shown:
        parts += ["## Figures", *shown]
    return "\n\n".join(parts) + "\n"


def _figures(report: Report, names: Sequence[str]) -> str:
    headings = [f"{name} ({len(group.runs)})" for name, group in zip(names, report.groups, strict=True)]
    if len(report.groups) != 2:
        rows = [[line.label, *(_cell(cell) for cell in line.cells)] for line in report.lines]
        return _table(["", *headings], rows)
    rows = []
    for line in report.lines:
        first, second = line.cells
        rows.append([line.label, first.value, second.value, second.delta, second.interval, _word(second)])
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
