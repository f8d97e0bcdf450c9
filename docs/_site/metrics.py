"""Writes the generated parts of docs/metrics.md from the catalogue: python docs/_site/metrics.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvlab.lab.results.catalogue import SERIES, SHARES, Metric, sections

PAGE = Path(__file__).parents[1] / "metrics.md"


def render(page: str) -> str:
    """The page with everything between `<!-- metrics -->` and `<!-- /metrics -->`, and between the same marks of
    `series`, made anew from the catalogue.
    """
    parts = {
        "metrics": "\n\n".join(_tables()),
        "series": ", ".join(f"`series/{name}`" for name in (*SERIES, *SHARES)),
    }
    for name, text in parts.items():
        mark = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        page = mark.sub(lambda match, text=text: match[1] + text + match[2], page)  # type: ignore[misc]
    return page


def _tables() -> Iterator[str]:
    for section, entries in sections().items():
        rows = {entry.family or entry.name: entry for entry in reversed(entries)}
        lines = [_row(name, entry) for name, entry in reversed(rows.items())]
        yield f"### {section}\n\n| metric | unit | better | formula |\n|---|---|---|---|\n" + "\n".join(lines)


def _row(name: str, entry: Metric) -> str:
    better = {True: "more", False: "less", None: "-"}[entry.direction.more_is_better]
    return f"| `{name}` | {entry.unit or '-'} | {better} | {entry.formula} |"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
