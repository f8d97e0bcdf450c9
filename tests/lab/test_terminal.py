"""What others wrote, printed: neither markup, nor emoji, nor anything that a terminal would obey."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.table import Table
from rich.tree import Tree

import kvlab.cli.run
from kvlab.lab.terminal import Terminal, marked, print_note, print_whole
from kvlab.secrets import redacted_output
from tests.support.commands import TINY, call

HOSTILE = "[/red] [bold]a[/] :smile: \x1b[2J\x1b]0;t\x07 \x9b1m \u202eb\\"
SHOWN = "[/red] [bold]a[/] :smile: \\x1b[2J\\x1b]0;t\\x07 \\x9b1m \\u202eb\\"


def console(colour: bool) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    return Terminal(file=file, width=200, force_terminal=colour, color_system="standard" if colour else None), file


@pytest.mark.parametrize("colour", [False, True])
def test_a_text_is_shown_as_it_is_wherever_it_is_printed(colour: bool) -> None:
    terminal, file = console(colour)
    table, tree = Table(HOSTILE), Tree(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(marked("[bold]{}[/]", HOSTILE))
    tree.add(marked("[dim]a[/]={}", HOSTILE))
    for shown in (HOSTILE, marked("[bold]x:[/] {}", HOSTILE), table, tree):
        terminal.print(shown, highlight=False)
    terminal.rule(marked("[bold]{}[/]", HOSTILE))
    print_note(terminal, HOSTILE)
    text = file.getvalue()
    assert text.count(SHOWN) == 9
    assert "\x1b[2J" not in text
    assert ("\x1b[1m" in text) is colour  # ours is markup


def test_a_plain_print_of_a_command_escapes_too_but_no_style_of_rich() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed), redacted_output():
        print(f"{HOSTILE}\n\tnext line")
        print("\r50 %", end="")
        Terminal(force_terminal=True, color_system="standard", width=80).print(marked("\n[bold]{}[/]", "a\x1b[2J"))
    assert printed.getvalue() == f"{SHOWN}\n\tnext line\n\r50 %\n\x1b[1ma\\x1b[2J\x1b[0m\n"


def test_a_run_and_its_names(tmp_path: Path) -> None:
    texts = {
        "run_name": "[/red]\x1b[2J",
        "model.name": "[/blue]\x07",
        "workload.name": "[bold]\x9b",
        "+tags.a": "[/x]\x1b",
    }
    given = [f"{key}='{text}'" for key, text in texts.items()]
    settings = ("tracking=off", "verbose=true", f"hydra.run.dir='{tmp_path / '[red]'}'")
    ended = call(kvlab.cli.run.main, *TINY, *settings, *given)
    assert ended.code == 0, ended.output
    for shown in ("[/red]\\x1b[2J", "[/blue]\\x07", "[bold]\\x9b", "[/x]\\x1b", str(tmp_path / "[red]")):
        assert shown in ended.output
    assert not {"\x1b", "\x07", "\x9b"} & set(ended.output)


def test_no_number_of_a_table_is_cut_where_the_terminal_is_narrow() -> None:
    file, table = io.StringIO(), Table("prompts", "outputs")
    table.add_row("123,456,789", "987,654,321")
    print_whole(Terminal(file=file, width=20), table)
    assert "123,456,789" in file.getvalue()
    assert "987,654,321" in file.getvalue()
    assert "\u2026" not in file.getvalue()
