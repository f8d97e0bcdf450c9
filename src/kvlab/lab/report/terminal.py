"""A report on the terminal."""

from itertools import groupby

from rich.table import Table
from rich.text import Text

from kvlab.lab.report.model import Cell, Report
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal, marked

_STYLES = {"good": "green", "bad": "red"}
_WIDE = 3  # with more groups than this each is a row, and only the main metrics are columns
_NARROW = 140  # characters of a terminal, with fewer of which three groups beside each other are cut off
_COLUMNS = 6
_MAIN_METRICS = (
    "throughput/output_tokens_per_s", "latency/ttft_ms_p50", "latency/tpot_ms_p50", "latency/e2el_ms_p99",
    "capacity/peak_running", "requests/preemptions",
)  # fmt: skip


def print_report(report: Report, console: Terminal) -> None:
    """Headlines, what differs, the table, outputs, warnings and what the gate found."""

    def say(text: str | Text) -> None:
        console.print(text, soft_wrap=True)

    console.rule(marked("[bold]{}[/]", report.title), align="left", style="dim")
    for sentence in report.headlines:
        say(sentence)
    if report.differences:
        say(marked("\n[bold]what differs[/]"))
    for key, values in report.differences.items():
        say(f"  {key}: {' | '.join(dict.fromkeys(values))}")
    console.print()
    most = _WIDE if console.width >= _NARROW else _WIDE - 1
    console.print(_by_group(report) if len(report.groups) > most else _by_metric(report))
    console.print()
    for name, text in report.outputs:
        say(f"greedy outputs of {name}: {text}")
    for text in report.warnings:
        say(marked("[yellow]warning:[/] {}", text))
    for text in report.method:
        say(marked("[dim]{}[/]", text))
    for finding in report.findings:
        word = "[red]failed:[/] {}" if finding.violated else "[green]passed:[/] {}"
        say(marked(word, finding.sentence))


def _by_metric(report: Report) -> Table:
    table = new_table("median")
    for number, group in enumerate(report.groups):
        heading = marked("{} [dim]({})[/]", group.name, len(group.runs))
        table.add_column(heading, justify="right", overflow="fold")
        if number:
            table.add_column("delta", justify="right")
            table.add_column("interval", justify="right")
            table.add_column("")
    for section, rows in groupby(report.rows, key=lambda row: row.section):
        table.add_row(Text(section, "bold"))
        for row in rows:
            first, *others = row.cells
            cells = [text for cell in others for text in (cell.value, cell.delta, cell.interval, _word(cell))]
            table.add_row(f"  {row.label}", first.value, *cells)
    return table


def _by_group(report: Report) -> Table:
    main = [row for row in report.rows if row.metric in _MAIN_METRICS]
    rows = (main if len(main) > 2 else report.rows)[:_COLUMNS]
    table = new_table("median", *(row.label for row in rows), overflow="fold")
    for number, group in enumerate(report.groups):
        cells = [row.cells[number] for row in rows]
        texts = [
            Text.assemble(cell.value, *(("\n", (cell.delta, "dim"), " ", _word(cell)) if cell.delta else ()))
            for cell in cells
        ]
        table.add_row(marked("{} [dim]({})[/]", group.name, len(group.runs)), *texts)
    return table


def _word(cell: Cell) -> Text:
    return Text(cell.word, _STYLES.get(cell.tone, ""))
