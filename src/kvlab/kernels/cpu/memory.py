"""Memory in large pages: fewer address translations for what is read from end to end; and how it is read."""

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import partial

import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.interface import LinearWeight, WeightFormat
from kvlab.kernels.cpu.native import load

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


def ways_to_read(num_bytes: int) -> list[Callable[[], object]]:
    """Calls that read so much memory in order, of which the fastest says how fast the machine does it: a sum, and
    a product by kvlab's kernel, where there is one.
    """
    source = empty((num_bytes // 8,), torch.int64).fill_(0x3C003C003C003C00)  # where weights and KV cache lie, too
    try:
        return [source.sum, partial(_read_as_weight, load(), source)]
    except KernelError:
        return [source.sum]


def _read_as_weight(library: ctypes.CDLL, source: torch.Tensor, inputs: int = 1024) -> None:
    """Have kvlab's kernel read all of `source`, as the weight of a product of one row."""
    outputs = source.nbytes // (2 * inputs)
    x, out = torch.ones(inputs, dtype=torch.bfloat16), torch.empty(outputs, dtype=torch.bfloat16)
    weight = LinearWeight(source.data_ptr(), None, None, outputs, inputs, WeightFormat.PLAIN, 2)
    sides = x.data_ptr(), inputs, 1, ctypes.addressof(weight)
    library.kvlab_linear(*sides, out.data_ptr(), False, torch.get_num_threads())
