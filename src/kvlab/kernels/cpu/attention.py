"""Attention over pages on the CPU, native."""

import torch

from kvlab.kernels.cpu.interface import address, kv_format
from kvlab.kernels.cpu.native import load, load_formats


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch: decode, prefill, chunks, or all of them at once.

    `q` `[T, heads, head_dim]`, its last two dimensions dense; `keys` and `values` `[blocks, kv_heads, block_size,
    head_dim]`; `block_tables` `[B, width]`, `seq_lens` `[B]`, `query_start` `[B + 1]` int32. Sequence `b` has
    `seq_lens[b]` tokens, the newest of which are the queries `query_start[b]:query_start[b + 1]`. All in float32 or
    all in bfloat16; or K, V or both in a format of `kv/formats.py` by its tensor's type (int4: uint8, whose last
    dimension is the bytes of a head), in int8 and fp8 each row with its factor in `key_scales` or `value_scales`
    `[blocks, kv_heads, block_size]` float32. Scores and sums are float32; weights may be
    rounded to bfloat16 where the processor multiplies it. Returns `[T, heads, head_dim]`.

    Raises KernelError where the kernels cannot be compiled.
    """
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    formats = kv_format(keys), kv_format(values)
    library = load_formats() if any(formats) else load()
    tensors = out, q, keys, values, key_scales, value_scales, block_tables, seq_lens, query_start
    heads, batch = (q.shape[1], keys.shape[1], q.shape[2]), (block_tables.shape[1], len(seq_lens))
    options = window or 0, scale, soft_cap or 0.0, *formats, False, q.element_size(), torch.get_num_threads()
    library.kvlab_paged_attention(*map(address, tensors), q.stride(0), *batch, *heads, keys.shape[2], *options)
    return out
