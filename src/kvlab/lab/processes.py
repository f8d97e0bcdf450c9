"""Work on several cores: tasks in processes that begin as copies of this one, so that they share what it has."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from kvlab.errors import CapacityError

Task = TypeVar("Task", bound=Hashable)
Result = TypeVar("Result")

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
    executor = ProcessPoolExecutor(
        min(processes, len(tasks)), multiprocessing.get_context("fork"), initializer=_begin, initargs=(work,)
    )
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


def _begin(work: Callable[[Any], Any]) -> None:
    """In a process of its own: Ctrl-C goes to the one that began it."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _work = work


def _do(task: Any) -> Any:
    if _work is None:
        raise RuntimeError("the process has no work")
    return _work(task)
