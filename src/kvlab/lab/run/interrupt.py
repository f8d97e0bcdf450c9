"""Stopping a run early: the step in progress is finished, what was measured is kept."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvlab.lab.terminal import Terminal


@contextmanager
def stop_on_signal(
    console: Terminal, when: str = "stopping after this step", *, asked: bool = False
) -> Iterator[Callable[[], bool]]:
    """Yield whether a first Ctrl-C (or SIGTERM) asked to stop, which is answered with `when` that will be; a second
    one, or the first where another has `asked` before, raises KeyboardInterrupt. Outside the main thread, where
    Python takes no signals, nothing asks.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        console.print(f"{when}; once more to stop at once", style="yellow")

    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
