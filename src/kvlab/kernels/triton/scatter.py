"""Writing a step's K and V into the blocks."""

import torch
import triton
import triton.language as tl

#: Numbers of K, and of V, that a program moves.
_NUMBERS = 2048


@triton.jit(do_not_specialize=["count"])
def _scatter(
    k, v, keys, values, slot_mapping, count,
    k_stride, k_head_stride, v_stride, v_head_stride, block_stride, head_stride, slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One (tile of tokens, KV head)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, COLS)
    slots = tl.load(slot_mapping + tokens, mask=tokens < count, other=-1)
    mask = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    source = tokens.to(tl.int64)[:, None]
    rows = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * slot_stride + head * head_stride
    target = rows[:, None] + dims[None, :]
    new_k = tl.load(k + source * k_stride + head * k_head_stride + dims[None, :], mask=mask, other=0.0)
    new_v = tl.load(v + source * v_stride + head * v_head_stride + dims[None, :], mask=mask, other=0.0)
    tl.store(keys + target, new_k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, new_v.to(values.dtype.element_ty), mask=mask)


def scatter_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store `k` and `v` `[T, kv_heads, head_dim]` in `keys` and `values` `[blocks, kv_heads, block_size, head_dim]`
    at `slot_mapping` `[T]` int64: block * block_size + offset, or -1 for a token that is not written.

    Raises ValueError for shapes or strides that do not fit together.
    """
    count, kv_heads, head_dim = k.shape
    if v.shape != k.shape or (keys.shape[1], keys.shape[3]) != (kv_heads, head_dim) or len(slot_mapping) != count:
        raise ValueError(
            f"K {list(k.shape)}, V {list(v.shape)} and {len(slot_mapping)} slots for a cache of {list(keys.shape)}"
        )
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"K and V must have one layout: strides {keys.stride()} and {values.stride()}")
    if {k.stride(2), v.stride(2), keys.stride(3)} != {1}:
        raise ValueError("the numbers of a head must be adjacent in K, in V and in the cache")
    if count == 0:
        return
    cols = triton.next_power_of_2(head_dim)
    tokens = min(max(1, _NUMBERS // cols), triton.next_power_of_2(count))
    _scatter[(triton.cdiv(count, tokens), kv_heads)](
        *(k, v, keys, values, slot_mapping, count),
        *(*k.stride()[:2], *v.stride()[:2], *keys.stride()[:3]),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys.shape[2],
        TOKENS=tokens,
        COLS=cols,
        num_warps=4,
    )
