"""A report's figures and files: one HTML page that needs nothing beside it, Markdown, and the images it shows."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.errors import OutputError
from kvlab.lab.files import attempt, replacing, write_text
from kvlab.lab.report.model import Image, Report, Row
from kvlab.lab.report.rows import value_text
from kvlab.lab.results.catalogue import SPEED, TIME, metric

if TYPE_CHECKING:
    import jinja2
    from matplotlib.figure import Figure

_GROUPS = 6  # groups that get figures of their own; more would bury the report
_METRICS = 4  # metrics that get a figure because they were asked for
_INTERACTIVE_GROUPS = 2  # groups with interactive figures: the baseline and the first beside it
_FACTS = ("machine", "device", "threads", "attention", "kernels", "workload_digest", "run_id", "started")


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


def write_report(report: Report, directory: Path, errors: list[OutputError] | None = None) -> Path:
    """Write report.html, report.md and the images that the latter shows. Returns the page's path.

    Raises OutputError for a file that cannot be written; with `errors` it is kept there, and the others are tried.
    """
    shown = []
    for number, image in enumerate(report.images):
        stem = re.sub(r"[^\w.=-]+", "_", image.group or "all")[:60]
        file = Path("figures") / f"{number:02d}-{image.name}-{stem}.png"
        with attempt(errors):
            with replacing(directory / file) as own:
                own.write_bytes(image.png)
            shown.append((f"{image.name}: {image.caption}", file))
    page = directory / "report.html"
    with attempt(errors):
        write_text(directory / "report.md", to_markdown(report, shown))
    with attempt(errors):
        write_text(page, to_html(report))
    return page


def to_html(report: Report) -> str:
    """The report's page. plotly.js, 4.7 MB, is within it where a figure needs it."""
    script = ""
    if report.interactive:
        from plotly.offline import get_plotlyjs

        script = get_plotlyjs()
    facts = [group.example.facts for group in report.groups]
    return template("report.html.j2").render(
        report=report,
        strips=_strips(report),
        facts=[{key: f[key] for key in _FACTS if key in f} | dict(f.get("environment", {})) for f in facts],
        plotly=script,
    )


def to_markdown(report: Report, figures: Iterable[tuple[str, Path]] = ()) -> str:
    """The report; `figures` are captions and paths of PNG files, relative to the directory of the text."""
    return template("report.md.j2").render(report=report, figures=list(figures))


@cache
def template(name: str) -> jinja2.Template:
    """A template of this directory."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape="html" in name, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "code": _code,
        "plain": lambda text: text.replace("|", "\\|").replace("\n", " "),
        "base64": lambda data: base64.b64encode(data).decode(),
        "median": median,
    }
    return environment.get_template(name)


def _code(text: str) -> Any:
    """HTML in which `this` is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


class _Strip(NamedTuple):
    """A metric's runs as dots on a scale from the smallest to the largest value."""

    row: Row
    low: float
    high: float

    def position(self, value: float) -> float:
        """On the scale, 0 to 100."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def text(self, value: float) -> str:
        return value_text(metric(self.row.metric), value)


def _strips(report: Report) -> list[_Strip]:
    """Of times and rates; none where every group has one run."""
    if max(len(group.runs) for group in report.groups) < 2:
        return []
    rows = [row for row in report.rows if metric(row.metric).direction in (SPEED, TIME)]
    values = [[value for cell in row.cells for value in cell.dots] or [0.0] for row in rows]
    strips = [_Strip(row, min(dots), max(dots)) for row, dots in zip(rows, values, strict=True)]
    return [strip for strip in strips if strip.low < strip.high]
