"""What ranks of one machine exchange, through memory that they share.

Between two layers each rank waits for the others. Gloo hands a tensor through threads that have to be woken, which
takes as long as a decode step's products (experiments/tensor_parallel). Here a rank looks until theirs are there.
"""

import mmap
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

MOST_BYTES = 2**18  # of a rank's tensor
_LINE = 64  # bytes of a processor's cache line: a rank's count has one of its own
_LOOKS = 2_000  # at the others' counts, about 0.1 ms, before the core is left to others for a moment
_PAUSE_S = 5e-5


def is_ordered() -> bool:
    """Whether stores of this processor are seen by others in their order, on which the counts rely."""
    return platform.machine().lower() in ("x86_64", "amd64")


class SharedMemory:
    """One rank's side of the memory in a file. All ranks exchange the same tensors in the same order.

    A rank writes its tensor, then its count of tensors. It may write the tensor after the next where this one is:
    by then all have counted the next, so that they have read this one. `check` is called while it waits, and raises
    what ends the waiting.
    """

    def __init__(self, path: str, rank: int, size: int, limit_s: float, check: Callable[[], None]) -> None:
        self._rank, self._size, self._limit_s, self._check = rank, size, limit_s, check
        with Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), _bytes(size))
        self._counts = memoryview(memory).cast("q")
        self._others = [_LINE // 8 * other for other in range(size) if other != rank]
        tensors = np.frombuffer(memory, np.uint8, offset=_LINE * size).reshape(2, size, MOST_BYTES)
        self._tensors = torch.from_numpy(tensors)
        self._count = 0

    @staticmethod
    def make(path: str, size: int) -> None:
        """Make the file, before any rank opens it."""
        with Path(path).open("xb") as file:
            file.write(bytes(_bytes(size)))  # now, since a full disk would end who writes there later

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` of all ranks, which have one shape and type: `[size, *x.shape]`, valid until the next exchange.

        Raises TimeoutError for a rank that does not answer, and what `check` raises.
        """
        self._count += 1
        used = self._tensors[self._count % 2, :, : x.numel() * x.element_size()].view(x.dtype)
        used[self._rank].copy_(x.reshape(-1))
        self._counts[_LINE // 8 * self._rank] = self._count
        for place in self._others:
            self._wait(place)
        return used.view(self._size, *x.shape)

    def _wait(self, place: int) -> None:
        counts, count = self._counts, self._count
        for _ in range(_LOOKS):
            if counts[place] >= count:
                return
        until = time.monotonic() + self._limit_s
        while counts[place] < count:
            time.sleep(_PAUSE_S)
            self._check()
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {self._limit_s:g} s")


def _bytes(size: int) -> int:
    return size * (_LINE + 2 * MOST_BYTES)
