"""Replays on several cores: each policy at each size is one of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvlab.lab.prefix_replay.replay import replay
from kvlab.lab.prefix_replay.traffic import Traffic
from kvlab.lab.processes import in_processes

_BLOCK_BYTES = 1_000  # of a replay, for each block of its pool
_WORTH = 300_000  # blocks to be looked up and stored, below which processes take longer than they save


class Task(NamedTuple):
    """One replay."""

    policy: str
    num_blocks: int


def replay_all(
    traffic: Traffic, tasks: Sequence[Task], concurrency: int, *, cores: int = 1, memory: int | None = None
) -> Iterator[tuple[Task, int]]:
    """The blocks that each replay finds, as they end, on so many cores and within so many bytes. For little work
    there are no processes. Raises CapacityError if one was killed.
    """
    processes = cores
    if memory is not None:
        processes = min(processes, memory // (_BLOCK_BYTES * max((task.num_blocks for task in tasks), default=1)))
    if sum(visit.blocks for visit in traffic.visits) * len(tasks) < _WORTH:
        processes = 1

    def work(task: Task) -> int:
        return replay(traffic, *task, concurrency)

    # The largest first, so that none is left for the end.
    ordered = sorted(tasks, key=lambda task: -task.num_blocks) if processes > 1 else tasks
    killed = "a process of the replay was killed, perhaps for memory: take fewer or smaller kv.num_blocks"
    yield from in_processes(work, ordered, processes, killed=killed)
