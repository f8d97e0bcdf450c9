"""What ranks exchange through shared memory: each has all of every exchange, and none waits for ever."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvlab.engine.shared_memory import MOST_BYTES, SharedMemory

DTYPES = (torch.float32, torch.float64)


def memories(path: Path, size: int, limit_s: float = 60.0) -> list[SharedMemory]:
    SharedMemory.make(str(path), size)
    return [SharedMemory(str(path), rank, size, limit_s, lambda: None) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_each_has_all_of_every_exchange_in_order(tmp_path: Path, size: int) -> None:
    draw = random.Random(size)
    shapes = [(draw.randrange(4), draw.choice([1, 7, 1024])) for _ in range(200)] + [(1, MOST_BYTES // 8)]
    wait_s = [[draw.choice([0.0] * 9 + [0.002]) for _ in shapes] for _ in range(size)]

    def run(rank: int, memory: SharedMemory) -> list[torch.Tensor]:
        found = []
        for number, shape in enumerate(shapes):
            time.sleep(wait_s[rank][number])
            own = torch.full(shape, float(size * number + rank), dtype=DTYPES[number % 2])
            found.append(memory.exchange(own).clone())
        return found

    with ThreadPoolExecutor(size) as pool:
        every = list(pool.map(run, range(size), memories(tmp_path / "shared", size)))
    for found in every:
        for number, (shape, tensors) in enumerate(zip(shapes, found, strict=True)):
            assert tensors.shape == (size, *shape)
            for rank in range(size):
                assert (tensors[rank] == size * number + rank).all()


def test_a_rank_that_does_not_answer_and_one_that_has_ended(tmp_path: Path) -> None:
    first, _ = memories(tmp_path / "shared", 2, limit_s=0.05)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        first.exchange(torch.zeros(1))
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise ConnectionError("a rank has ended")

    SharedMemory.make(str(tmp_path / "other"), 2)
    waiting = SharedMemory(str(tmp_path / "other"), 1, 2, 60.0, check)
    threading.Timer(0.05, ended.set).start()
    with pytest.raises(ConnectionError, match="a rank has ended"):
        waiting.exchange(torch.zeros(1))
