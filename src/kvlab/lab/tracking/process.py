"""Which process makes a run, and whether it still does."""

import os
import platform

import psutil

_SLACK_S = 2.0  # a process's start has a resolution of a second, and some systems round it


def this_process() -> str:
    """This process as `host:pid:start`, fit for a tag."""
    return f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def number_here(process: str | None) -> int | None:
    """The number of a process that `this_process` described; None if it is of another machine."""
    parts = (process or "").rsplit(":", 2)
    is_here = len(parts) == 3 and parts[0] == platform.node() and parts[1].isdigit()
    return int(parts[1]) if is_here else None


def is_alive(process: str | None) -> bool | None:
    """Whether the process that `this_process` described still runs; None where that cannot be known from here."""
    if process is None or (number := number_here(process)) is None:
        return None
    try:
        there, start = psutil.Process(number), process.rpartition(":")[2]
        return bool(abs(there.create_time() - float(start)) <= _SLACK_S and there.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return None
