"""Memory in large pages, for what is read from end to end: reading needs fewer addresses looked up."""

from __future__ import annotations

import math
import mmap

import torch

LARGE_PAGE = 2 * 2**20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor whose memory is taken when it is first written, in large pages as far as whole ones go.

    Where the system has none to give, or for a small tensor, the pages are ordinary ones.
    """
    size = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < LARGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    first = -whole.data_ptr() % LARGE_PAGE
    memory.madvise(advice, first, size // LARGE_PAGE * LARGE_PAGE)
    return whole[first : first + size].view(dtype).view(shape)
