"""Compile every kernel for a Hopper GPU on a machine that has none: `python -m tests.kernels.offline [words]`.

Each launcher is called as a model would call it, with launches replaced by compilation, so that what is compiled is
what the launcher asks for. With words, only the calls whose description has one of them. Prints a line for each
kernel: its shared memory, and the bytes a thread spills to local memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from experiments.gpu.compiled import compile_launches
from kvlab.kernels.triton.decode import paged_decode
from kvlab.kernels.triton.prefill import paged_prefill
from kvlab.kernels.triton.rms_norm import rms_norm
from kvlab.kernels.triton.rotary import rotate_in_place
from kvlab.kernels.triton.scatter import scatter_kv

ARCHITECTURE = 90
SHARED_BYTES = 227 * 1024  # what a program can have on it


Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def cache(dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int) -> Cache:
    """K, V, block tables and lengths of three sequences."""
    keys = torch.zeros(4, kv_heads, block_size, head_dim, dtype=dtype)
    tables, lengths = torch.zeros(3, 40, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    return keys, torch.zeros_like(keys), tables, lengths


def attention_cases() -> Iterator[tuple[torch.dtype, int, int, int, dict[str, Any]]]:
    """(dtype, group, head_dim, block_size, options)"""
    for head_dim in (64, 80, 128, 256):
        yield torch.bfloat16, 4, head_dim, 16, {}
        yield torch.float32, 4, head_dim, 16, {}
    yield torch.float16, 4, 128, 16, {}
    yield torch.float32, 4, 32, 16, {"window": 32}
    yield torch.bfloat16, 4, 128, 4096, {}
    for dtype in (torch.bfloat16, torch.float32):
        yield dtype, 1, 128, 16, {}
        yield dtype, 3, 128, 24, {"window": 100}
        yield dtype, 2, 256, 1, {"window": 1024, "soft_cap": 30.0}
    yield torch.bfloat16, 32, 128, 4096, {"soft_cap": 30.0}


def calls() -> Iterator[tuple[str, Any]]:
    """Every launcher with its arguments, as (description, function that calls it)."""
    starts = torch.tensor([0, 1, 101, 400], dtype=torch.int32)
    for dtype, group, head_dim, block_size, options in attention_cases():
        where = f"{dtype} group {group} head_dim {head_dim} block_size {block_size} {options}"
        pool = cache(dtype, 2, head_dim, block_size)
        q = torch.zeros(400, 2 * group, head_dim, dtype=dtype)
        options = {"scale": 0.1, **options}
        yield f"decode {where}", lambda q=q, pool=pool, o=options: paged_decode(q[:3], *pool, **o)
        yield (
            f"split decode {where}",
            lambda q=q, pool=pool, o=options: paged_decode(q, *pool, split_tokens=16, query_start=starts, **o),
        )
        inputs, short = (q, *pool, starts), (q[:9], *pool, starts)
        yield f"prefill {where}", lambda x=inputs, o=options: paged_prefill(*x, least=2, **o)
        yield f"short prefill {where}", lambda x=short, o=options: paged_prefill(*x, **o)
    for dtype in (torch.bfloat16, torch.float32):
        keys, values, *_ = cache(dtype, 8, 128, 16)
        qkv = torch.zeros(33, 48, 128, dtype=dtype)
        q, k, v = qkv.split([32, 8, 8], dim=1)
        angles, places = torch.zeros(64, 128, dtype=dtype), torch.zeros(33, dtype=torch.int64)
        yield (
            f"scatter {dtype}",
            lambda k=k, v=v, keys=keys, values=values, s=places: scatter_kv(k, v, keys, values, s),
        )
        yield f"rotary {dtype}", lambda q=q, k=k, a=angles, s=places: rotate_in_place(q, k, a, a, s)
        yield f"rotary per token {dtype}", lambda q=q, k=k, a=angles[:33]: rotate_in_place(q, k, a, a)
        yield f"head norm {dtype}", lambda q=q: rms_norm(q, q[0, 0], 1e-6)
        for width in (1000, 4096, 16384):
            x = torch.zeros(7, width, dtype=dtype)
            yield f"norm {width} {dtype}", lambda x=x: rms_norm(x, x[0], 1e-6, residual=x, offset=True)


if __name__ == "__main__":
    for description, call in calls():
        if len(sys.argv) == 1 or any(word in description for word in sys.argv[1:]):
            print(description, flush=True)
            for one in compile_launches(ARCHITECTURE, call):
                print(f"  {one.kernel:12} shared {one.shared_bytes:6}  spilled {one.spilled}", flush=True)
                if one.shared_bytes > SHARED_BYTES:
                    raise SystemExit(f"{one.kernel} needs {one.shared_bytes} bytes of shared memory")
