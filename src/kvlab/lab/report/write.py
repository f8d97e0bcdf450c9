"""A report's files."""

from __future__ import annotations

import re
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.lab.report.html import to_html
from kvlab.lab.report.markdown import to_markdown
from kvlab.lab.report.model import Report


def write_report(report: Report, directory: Path) -> Path:
    """Write report.html, report.md and the pictures that the latter shows. Returns the page's path.

    Raises ConfigError where nothing can be written.
    """
    shown = []
    try:
        (directory / "figures").mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(report.pictures):
            stem = re.sub(r"[^\w.=-]+", "_", picture.group or "all")[:60]
            file = Path("figures") / f"{number:02d}-{picture.name}-{stem}.png"
            (directory / file).write_bytes(picture.png)
            shown.append((f"{picture.name}: {picture.group or 'all runs'}", file))
        (directory / "report.md").write_text(to_markdown(report, shown), encoding="utf-8")
        page = directory / "report.html"
        page.write_text(to_html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", directory, f"cannot be written: {error.strerror or error}") from error
    return page
