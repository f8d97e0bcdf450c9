"""Replays on several cores: each policy at each size is one of its own."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from kvlab.errors import CapacityError
from kvlab.lab.prefix_replay.replay import replay
from kvlab.lab.prefix_replay.traffic import Traffic

_BLOCK_BYTES = 1_000  # of a replay, for each block of its pool
_WORTH = 300_000  # blocks to be looked up and stored, below which processes take longer than they save


class Task(NamedTuple):
    """One replay."""

    policy: str
    num_blocks: int


_traffic: tuple[Traffic, int] | None = None  # of this process, and how many requests hold their blocks at once


def replay_all(
    traffic: Traffic, tasks: Sequence[Task], concurrency: int, *, cores: int = 1, memory: int | None = None
) -> Iterator[tuple[Task, int]]:
    """The blocks that each replay finds, as they end, on so many cores and within so many bytes.

    Processes begin as copies of this one, so that they share the traffic: where a system cannot do that, and for
    little work, there are none. An exception, of Ctrl-C too, ends them. Raises CapacityError if one was killed.
    """
    work = sum(visit.blocks for visit in traffic.visits) * len(tasks)
    processes = min(cores, len(tasks))
    if memory is not None:
        processes = min(processes, memory // (_BLOCK_BYTES * max((task.num_blocks for task in tasks), default=1)))
    if processes < 2 or work < _WORTH or sys.platform != "linux":
        yield from ((task, replay(traffic, *task, concurrency)) for task in tasks)
        return
    yield from _in_processes(traffic, tasks, concurrency, processes)


def _in_processes(
    traffic: Traffic, tasks: Iterable[Task], concurrency: int, processes: int
) -> Iterator[tuple[Task, int]]:
    executor = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=(traffic, concurrency)
    )
    before = set(multiprocessing.active_children())
    try:
        # The largest first, so that none is left for the end.
        ordered = sorted(tasks, key=lambda task: -task.num_blocks)
        futures = {executor.submit(_replay, task): task for task in ordered}
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
            text = "a process of the replay was killed, perhaps for memory: take fewer or smaller kv.num_blocks"
            raise CapacityError(text) from error
        raise


def _begin(traffic: Traffic, concurrency: int) -> None:
    """In a process of its own: Ctrl-C goes to the one that began it."""
    global _traffic
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _traffic = traffic, concurrency


def _replay(task: Task) -> int:
    if _traffic is None:
        raise RuntimeError("the process has no traffic")
    return replay(_traffic[0], *task, _traffic[1])
