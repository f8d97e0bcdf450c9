"""Top-k of each row on the CPU, native."""

from __future__ import annotations

import torch

from kvlab.kernels.cpu.native import load

DTYPES = (torch.float32, torch.bfloat16)


def topk(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest numbers of each row of `x` `[rows, size]`, float32 or bfloat16, and their indices, int64:
    both `[rows, count]`, largest first and of equals the first first. NaN counts as the largest.

    Raises ValueError for a count that is not from 1 to `size`, KernelError where the kernels cannot be compiled.
    """
    rows, size = x.shape
    if not 1 <= count <= size:
        raise ValueError(f"top-k with k={count} of {size} numbers: k must be from 1 to {size}")
    if x.stride(1) != 1:
        x = x.contiguous()
    values = torch.empty(rows, count, dtype=x.dtype)
    indices = torch.empty(rows, count, dtype=torch.int64)
    load().kvlab_topk(
        x.data_ptr(),
        x.stride(0),
        rows,
        size,
        count,
        values.data_ptr(),
        indices.data_ptr(),
        x.element_size(),
        torch.get_num_threads(),
    )
    return values, indices
