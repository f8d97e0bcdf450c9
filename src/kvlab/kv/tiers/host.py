"""Main memory as a tier: a second pool, whose pages lie one behind the other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.config import format_bytes
from kvlab.errors import CapacityError
from kvlab.kv.tiers.base import Key, Page, PageStore

if TYPE_CHECKING:
    import torch

    from kvlab.kv.storage import KVStorage


class HostStore(PageStore):
    """A buffer of `capacity` pages, taken at once. Raises CapacityError where there is no memory for it: a system
    may promise more than it has, and end who takes it.
    """

    def __init__(self, capacity: int, page_bytes: int) -> None:
        size, free = capacity * page_bytes, _free_memory()
        if size > free:
            raise CapacityError(
                f"kv.offload: {capacity} blocks take {format_bytes(size)} of main memory, which has "
                f"{format_bytes(free)} available; kv.offload={free * 9 // 10 // 2**20}MiB would fit"
            )
        import torch  # this late: a simulated tier has no pages

        from kvlab.kernels.cpu.memory import empty

        try:
            # Written now, so that the first evictions do not wait for memory.
            self._pages = empty((capacity, page_bytes), torch.uint8).zero_().numpy()
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapacityError(
                f"kv.offload: {capacity * page_bytes} bytes of memory are not there: {error}"
            ) from error

    def kept(self) -> Iterable[Key]:
        return ()

    def page(self, place: int) -> Page:
        """The page at a place itself."""
        page: Page = self._pages[place]
        return page

    def write(self, place: int, key: Key, page: Page) -> None:
        self._pages[place] = page

    def read(self, place: int, key: Key, page: Page) -> None:
        page[:] = self._pages[place]

    def remove(self, place: int, key: Key) -> None:
        """Nothing: the next content is written over it."""

    def close(self) -> None:
        """Nothing: the memory goes with the store."""


class BlockPages:
    """The blocks of a pool as pages: a block's bytes in each tensor, layer by layer, one tensor after another, in
    the order that the pool has them in memory.
    """

    def __init__(self, storage: KVStorage) -> None:
        self._parts = storage.block_bytes()
        self.page_bytes = sum(part.shape[0] * part.shape[2] for part in self._parts)

    def save(self, block: int, page: Page) -> None:
        """Copy a block's content into a page."""
        for inside, outside in self._pairs(block, page):
            outside.copy_(inside)

    def load(self, block: int, page: Page) -> None:
        """Copy a page into a block."""
        for inside, outside in self._pairs(block, page):
            inside.copy_(outside)

    def _pairs(self, block: int, page: Page) -> list[tuple[torch.Tensor, torch.Tensor]]:
        import torch

        whole, start, pairs = torch.from_numpy(page), 0, []
        for part in self._parts:
            layers, _, size = part.shape
            pairs.append((part[:, block], whole[start : start + layers * size].view(layers, size)))
            start += layers * size
        return pairs


def _free_memory() -> int:
    """Bytes of main memory that a process may still take, as far as the system says; else more than there are."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return sys.maxsize
