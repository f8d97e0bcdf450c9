"""Work on several cores: tasks in processes that begin as copies of this one, so that they share what it has."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from kvlab.errors import CapacityError

Task = TypeVar("Task", bound=Hashable)
Result = TypeVar("Result")

_SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG of prctl(2)
_work: Callable[[Any], Any] | None = None  # of this process


def in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int, *, killed: str
) -> Iterator[tuple[Task, Result]]:
    """The result of each task, as they end. With one process, or one task, or on a system that cannot copy a
    process, it is done here, in the order of the tasks.

    An exception, of Ctrl-C too, ends the processes. Raises CapacityError with the words of `killed` if one was.
    """
    if min(processes, len(tasks)) < 2 or sys.platform != "linux":
        yield from ((task, work(task)) for task in tasks)
        return
    copies, begun = multiprocessing.get_context("fork"), (work, os.getpid())
    executor = ProcessPoolExecutor(min(processes, len(tasks)), copies, initializer=_begin, initargs=begun)
    before = set(multiprocessing.active_children())
    try:
        futures = {executor.submit(_do, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
        executor.shutdown()
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        # The executor's own thread waits for the processes. Were this one to wait too, it could return between the
        # other's wait and its note of the end, and find a process that is gone among the active ones.
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise CapacityError(killed) from error
        raise


def end_with(parent: int) -> None:
    """Have this process get a SIGTERM when the thread that began it ends, also where its parent is killed; at once,
    if that has ended. On Linux alone, where prctl(2) is allowed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_END, signal.SIGTERM)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """In a process of its own: Ctrl-C goes to the one that began it."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    _work = work


def _do(task: Any) -> Any:
    if _work is None:
        raise RuntimeError("the process has no work")
    return _work(task)
