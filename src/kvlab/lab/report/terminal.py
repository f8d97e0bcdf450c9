"""A report on the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlab.lab.report.model import Cell, Report

_STYLES = {"good": "green", "bad": "red"}
_WIDE = 3  # with more groups than this each is a row, and only the main metrics are columns
_COLUMNS = 6
_MAIN_METRICS = (
    "throughput/output_tokens_per_s",
    "latency/ttft_ms_p50",
    "latency/tpot_ms_p50",
    "latency/e2el_ms_p99",
    "capacity/peak_running",
    "requests/preemptions",
)


def print_report(report: Report, console: Console) -> None:
    """Headlines, what differs, the table, outputs, warnings and what the gate found. All names are escaped."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    console.rule(f"[bold]{escape(report.title)}[/]", align="left", style="dim")
    for sentence in report.headlines:
        say(escape(sentence))
    if report.differences:
        say("\n[bold]what differs[/]")
    for key, values in report.differences.items():
        say(f"  {escape(key)}: {escape(' | '.join(dict.fromkeys(values)))}")
    console.print()
    console.print(_by_group(report) if len(report.groups) > _WIDE else _by_metric(report))
    console.print()
    for name, text in report.outputs:
        say(f"greedy outputs of {escape(name)}: {escape(text)}")
    for text in report.warnings:
        say(f"[yellow]warning:[/] {escape(text)}")
    for text in report.method:
        say(f"[dim]{escape(text)}[/]")
    for finding in report.findings:
        say(("[red]failed:[/] " if finding.violated else "[green]passed:[/] ") + escape(finding.sentence))


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
            first, *others = row.cells
            cells = [text for cell in others for text in (cell.value, cell.delta, cell.interval, _word(cell))]
            table.add_row(f"  {escape(row.label)}", first.value, *cells)
    return table


def _by_group(report: Report) -> Table:
    main = [row for row in report.rows if row.metric in _MAIN_METRICS]
    rows = (main if len(main) > 2 else report.rows)[:_COLUMNS]
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("median", overflow="fold")
    for row in rows:
        table.add_column(escape(row.label), justify="right")
    for number, group in enumerate(report.groups):
        cells = [row.cells[number] for row in rows]
        texts = [cell.value + (f"\n[dim]{cell.delta}[/] {_word(cell)}" if cell.delta else "") for cell in cells]
        table.add_row(f"{escape(group.name)} [dim]({len(group.runs)})[/]", *texts)
    return table


def _word(cell: Cell) -> str:
    return f"[{_STYLES[cell.tone]}]{cell.word}[/]" if cell.tone in _STYLES else cell.word
