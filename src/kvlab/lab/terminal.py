"""The terminal: text of others, as a run's name or a path, is shown as it is and changes nothing there."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from kvlab.errors import printable


class Terminal(Console):
    """A console that takes no string for markup or emoji, colours no numbers, and shows control characters as
    escapes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    @property
    def encoding(self) -> str:
        """That of the stream, so that tables are drawn in characters which it has."""
        return getattr(self.file, "encoding", None) or "utf-8"

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, alone or in a table, becomes a Text here."""
        return super().render_str(printable(text), **options)


def marked(template: str, *values: object) -> Text:
    """Our own markup, with the text of others in place of each `{}`."""
    shown = (escape(printable(str(value))) for value in values)
    return Text.from_markup(template.format(*shown), emoji=False)


def print_whole(console: Terminal, table: Table) -> None:
    """Print a table of numbers, none of which is cut: lines that a narrow terminal has no room for go on below."""
    options = console.options
    needed = Measurement.get(console, options.update(max_width=1000), table).maximum
    lines = console.render(table, options.update(width=max(needed, options.max_width)))
    console.print(Segments(lines), soft_wrap=True, end="")


def warn(*texts: object) -> None:
    """Print what the user should know on standard error, a line each."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def print_note(console: Terminal, message: str, kind: str = "warning") -> None:
    """Print what the user should know."""
    console.print(marked("[yellow]{}:[/] {}", kind, message), soft_wrap=True)
