"""`kvlab`: one name for all commands. It imports none of them before one is chosen."""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

from kvlab.cli.output import lasting_output
from kvlab.cli.settings import fail
from kvlab.errors import nearest


class Command(NamedTuple):
    """What the help page says of a command. Its code is `main` of `module_of` its name."""

    purpose: str
    example: str
    others: Sequence[str] = ()  # what other programs call it


_FILE = Path(__file__).with_name("commands.json")
COMMANDS = {name: Command(**about) for name, about in json.loads(_FILE.read_text(encoding="utf-8")).items()}
_MEANT = {other: name for name, command in COMMANDS.items() for other in command.others}
_COMPLETED = ("run", "tune", "capacity")  # those that take the settings of a run


def module_of(command: str) -> str:
    """The module of a command: its name, with an underscore behind a keyword."""
    return f"kvlab.cli.{command}{'_' * iskeyword(command)}"


def help_page() -> str:
    """Every command with its purpose and an example."""
    lines = ["kvlab: a laboratory for KV-cache memory in LLM serving", ""]
    lines += ["usage: kvlab COMMAND [SETTING=VALUE ...]", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<14}{command.purpose}", f"  {'':<14}  kvlab {name} {command.example}"]
    last = "kvlab COMMAND --help lists its settings. Results and the tracking store go to the working directory."
    return "\n".join([*lines, "", last, 'Completion in bash: eval "$(kvlab run -sc install=bash)"'])


def main() -> None:
    """Run the command that the first argument names, with the others as its command line."""
    program, *arguments = sys.argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        with lasting_output():  # also for `kvlab --help | head`
            print(help_page())
    elif name == "--version":
        import kvlab

        print(f"kvlab {kvlab.__version__}")
    elif name in ("-sc", "--shell-completion") or name.startswith("--shell-completion="):
        _complete()
    elif name in COMMANDS:
        sys.argv = [program, *arguments[1:]]
        try:
            import_module(module_of(name)).main()
        except KeyboardInterrupt:  # while it was imported: a command that has begun says what it leaves
            sys.exit(130)
    else:
        question = "did you mean {}? "
        hint = question.format(_MEANT[name]) if name in _MEANT else nearest(name, COMMANDS, question)
        fail(f"{name}: no such command; {hint}there are: {', '.join(COMMANDS)}")


def _complete() -> None:
    """Answer Hydra's completion script, which calls `kvlab` without the command that the line names."""
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    command, space, settings = rest.lstrip().partition(" ")
    asks = any("query=" in argument for argument in sys.argv)
    if asks and not space:
        print(" ".join(COMMANDS))
    elif not asks or command in _COMPLETED:
        os.environ["COMP_LINE"] = f"{program} {settings}"
        import_module("kvlab.cli.run").main()
