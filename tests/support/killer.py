"""A command that is sent a signal at a chosen moment: from within, as a function is called.

    python -m tests.support.killer TARGET CALL WHEN SIGNAL kvlab-command [argument ...]

`TARGET` is the dotted path of a function or method, `CALL` which of its calls counts, `WHEN` before or after it.
The commands themselves have no such hook.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

STRUCK = "-- struck --"  # printed as the signal is sent


def find(target: str) -> tuple[Any, str]:
    """The module or class that a dotted path is in, and its name there. Raises AttributeError."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        getattr(owner, parts[-1])
        return owner, parts[-1]
    raise AttributeError(f"{target}: no such module")


def strike_at(target: str, call: int, when: str, number: int) -> None:
    """Let this process send itself a signal before or after a call of the target."""
    owner, name = find(target)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def strike() -> None:
        sys.stdout.flush()
        os.write(1, f"{STRUCK}\n".encode())
        os.kill(os.getpid(), number)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        struck = calls == call
        if struck and when == "before":
            strike()
        result = original(*args, **kwargs)
        if struck and when == "after":
            strike()
        return result

    setattr(owner, name, counted)


def main(arguments: list[str]) -> None:
    target, call, when, number, *command = arguments
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what runs in the background ignores
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which what nohup starts ignores
    strike_at(target, int(call), when, getattr(signal, number))
    run(command)


def run(command: list[str]) -> None:
    """`kvlab` with these arguments, and nothing that strikes."""
    from kvlab.cli.main import main as kvlab

    sys.argv = ["kvlab", *command]
    kvlab()


if __name__ == "__main__":
    main(sys.argv[1:])
