"""A report on the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlab.lab.report.model import Cell, Report, Row

_STYLES = {"good": "green", "bad": "red", "plain": "", "": ""}
_WIDE = 3  # with more groups than this each is a row, and only the main metrics are columns
_COLUMNS = 6


def print_report(report: Report, console: Console) -> None:
    """Headlines, what differs, the table, outputs, warnings and what the gate found. All names are escaped."""
    console.rule(f"[bold]{escape(report.title)}[/]", align="left", style="dim")
    for sentence in report.headlines:
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    if report.differences:
        console.print("\n[bold]what differs[/]")
        for difference in report.differences:
            values = " | ".join(dict.fromkeys(difference.values))
            console.print(f"  {escape(difference.key)}: {escape(values)}", highlight=False, soft_wrap=True)
    console.print()
    console.print(_by_group(report) if len(report.groups) > _WIDE else _by_metric(report))
    console.print()
    for name, text in report.outputs:
        console.print(f"greedy outputs of {escape(name)}: {escape(text)}", highlight=False, soft_wrap=True)
    for text in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    for text in report.method:
        console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)
    for finding in report.findings:
        colour, word = ("red", "failed") if finding.violated else ("green", "passed")
        console.print(f"[{colour}]{word}:[/] {escape(finding.sentence)}", highlight=False, soft_wrap=True)


def _by_metric(report: Report) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("median")
    for number, group in enumerate(report.groups):
        table.add_column(f"{escape(group.name)} [dim]({len(group.runs)})[/]", justify="right", overflow="fold")
        if number:
            table.add_column("delta", justify="right")
            table.add_column("interval", justify="right")
            table.add_column("")
    for section, rows in groupby(report.rows, key=lambda row: row.section):
        table.add_row(f"[bold]{section}[/]")
        for row in rows:
            others = [
                text for cell in row.cells[1:] for text in (cell.value, cell.delta, cell.interval, _word(cell))
            ]
            table.add_row(f"  {escape(row.label)}", row.cells[0].value, *others)
    return table


def _by_group(report: Report) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("median", overflow="fold")
    rows = _main_rows(report)
    for row in rows:
        table.add_column(escape(row.label), justify="right")
    for number, group in enumerate(report.groups):
        cells = [row.cells[number] for row in rows]
        changes = [f"\n[dim]{cell.delta}[/] {_word(cell)}" if cell.delta else "" for cell in cells]
        texts = [cell.value + change for cell, change in zip(cells, changes, strict=True)]
        table.add_row(f"{escape(group.name)} [dim]({len(group.runs)})[/]", *texts)
    return table


def _main_rows(report: Report) -> list[Row]:
    """What is shown where there is no room for all metrics."""
    wanted = (
        "throughput/output_tokens_per_s",
        "latency/ttft_ms_p50",
        "latency/tpot_ms_p50",
        "latency/e2el_ms_p99",
        "capacity/peak_running",
        "requests/preemptions",
    )
    usual = [row for row in report.rows if row.metric in wanted]
    return (usual if len(usual) > 2 else report.rows)[:_COLUMNS]


def _word(cell: Cell) -> str:
    style = _STYLES[cell.tone]
    return f"[{style}]{cell.word}[/]" if style and cell.word else cell.word
