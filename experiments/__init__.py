"""The published comparisons, each with a script: `python -m experiments.<name>.run`."""

import sys
from types import TracebackType


def _interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a script that is stopped with Ctrl-C as commands end: in one line, with 130."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("interrupted", file=sys.stderr)
    sys.exit(130)


if sys.argv[:1] == ["-m"]:  # while Python looks for a module of this package to run
    sys.excepthook = _interrupted
