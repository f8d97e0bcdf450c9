"""Norms, rotary angles, the gate and top-k of rows on the CPU, native. Float32 or bfloat16 throughout."""

import torch

from kvlab.kernels.cpu.interface import MAX_HEAD_DIM, address, kv_format
from kvlab.kernels.cpu.native import load


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension of `x` `[..., size]`, which is dense; computed in float32.

    With a `residual` of the same shape, in float32, `x` is added to it, in place, and the norm is of the sum.
    `weight` `[size]` has the dtype of `x` or float32.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    size, tensors = x.shape[-1], map(address, (x, residual, weight))
    options = address(out), False, x.element_size(), weight.element_size(), torch.get_num_threads()
    load().kvlab_rms_norm(*tensors, eps, x.numel() // size, size, *options)
    return out


def gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """`[rows, 2 * size]`, gate and up side by side, to `[rows, size]`: silu(gate) * up, or gelu (its tanh form)."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    load().kvlab_gated(
        address(gate_up), rows, width // 2, gelu, address(out), gate_up.element_size(), torch.get_num_threads()
    )
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries normed and rotated, keys normed, rotated and stored, values stored, in one pass.

    `qkv` `[T, heads + 2 * kv_heads, head_dim]`; `keys`, `values` `[blocks, kv_heads, block_size, head_dim]`, of the
    same dtype or in a format that `paged_attention` reads, with its `key_scales` or `value_scales`; `cosine` and
    signed `sine` `[positions, head_dim]`, indexed by `positions` `[T]` int64; `slot_mapping` `[T]` int64, -1 for a
    token whose K and V are stored already. Weights `[head_dim]` of the norms, both or neither.
    Returns the queries `[T, heads, head_dim]`.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise ValueError(f"heads of {head_dim}: must be even, and at most {MAX_HEAD_DIM}")
    heads = all_heads - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, head_dim)
    element = qkv.element_size()
    load().kvlab_rotate_and_store(
        *map(address, (qkv, q_weight, k_weight)),
        eps,
        *map(address, (cosine, sine, positions, slot_mapping)),
        *(tokens, heads, kv_heads, head_dim, block_size),
        *map(address, (q, keys, values, key_scales, value_scales)),
        *(kv_format(keys), kv_format(values), element),
        element if q_weight is None else q_weight.element_size(),
        torch.get_num_threads(),
    )
    return q


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
    out = *map(address, (values, indices)), x.element_size(), torch.get_num_threads()
    load().kvlab_topk(address(x), x.stride(0), rows, size, count, *out)
    return values, indices
