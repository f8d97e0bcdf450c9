"""What commands share that take settings as key=value: their page for --help, and how a mistake ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvlab.errors import KvlabError


def run_command(page: str | None, answer: Callable[[list[str]], int]) -> None:
    """Print `page` where help is asked for, else `answer` the arguments and exit with its code, unless that is 0.

    A KvlabError is shown as a sentence, and ends the process with code 2.
    """
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(page)
        return
    try:
        code = answer(arguments)
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if code:
        sys.exit(code)
