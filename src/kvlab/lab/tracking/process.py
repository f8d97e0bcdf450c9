"""Which process makes a run, and whether it still does."""

import os
import platform

import psutil

_SLACK_S = 2.0  # a process's start has a resolution of a second, and some systems round it


def this_process() -> str:
    """This process as `host:pid:start`, fit for a tag."""
    return f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def is_alive(process: str | None) -> bool | None:
    """Whether the process that `this_process` described still runs; None where that cannot be known from here."""
    parts = (process or "").rsplit(":", 2)
    if len(parts) != 3:
        return None
    host, pid, start = parts
    if host != platform.node() or not pid.isdigit():
        return None
    try:
        there = psutil.Process(int(pid))
        return bool(abs(there.create_time() - float(start)) <= _SLACK_S and there.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return None
