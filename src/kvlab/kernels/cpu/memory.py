"""Memory in large pages: fewer address translations for what is read from end to end."""

from __future__ import annotations

import math
import mmap

import torch

LARGE_PAGE = 2 * 2**20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor in large pages, as far as whole ones fit. The system provides a page when it is
    first written.

    Where the system has no large pages, and for a small tensor, ordinary pages are used.
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
