"""Stopping a run early: the step in progress is finished, what was measured is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rich.console import Console


@dataclass(slots=True)
class StopRequest:
    """Set once a signal asked the run to stop."""

    is_set: bool = False


@contextmanager
def stop_on_signal(console: Console) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C (or SIGTERM) into a StopRequest; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python takes no signals, the request is never set.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set:
            raise KeyboardInterrupt
        stop.is_set = True
        console.print("[yellow]stopping after this step; once more to stop at once[/]")

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
