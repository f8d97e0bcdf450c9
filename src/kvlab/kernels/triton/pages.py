"""A tile of a sequence's K and V, read from its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: What a tile of K or V takes. The decode kernel holds two of each, one in use and one on its way, and three of its
#: programs then fit in the shared memory of a Hopper processor at once.
_TILE_BYTES = 16 * 1024


@triton.jit
def load_keys_and_values(
    keys,
    values,
    table,
    tokens,
    stop,
    block_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLS: tl.constexpr,
):
    """K `[COLS, tokens]` and V `[tokens, COLS]` of one head at `tokens`, 0 from `stop` on and beyond the head.

    Each token looks up its own block, so that a tile may span many small blocks or lie inside a large one.
    """
    dims = tl.arange(0, COLS)
    here, in_head = tokens < stop, dims < HEAD_DIM
    # A pool can have more than 2^31 numbers.
    block = tl.load(table + tokens // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
    rows = block * block_stride + (tokens % BLOCK_SIZE) * slot_stride
    k = tl.load(keys + rows[None, :] + dims[:, None], mask=in_head[:, None] & here[None, :], other=0.0)
    v = tl.load(values + rows[:, None] + dims[None, :], mask=here[:, None] & in_head[None, :], other=0.0)
    return k, v


def padded_dim(head_dim: int) -> int:
    """The width of a tile for heads of this size: a power of two, and what `tl.dot` needs at least."""
    padded: int = triton.next_power_of_2(head_dim)
    return max(16, padded)


def tile_tokens(cols: int, element_size: int, most: int) -> int:
    """Tokens in a tile of K or V, a power of two."""
    return max(16, min(most, _TILE_BYTES // (cols * element_size)))


def check_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Raise ValueError for tensors that the attention kernels would misread."""
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(
            f"K and V must have one layout: {list(keys.shape)} with strides {keys.stride()} "
            f"and {list(values.shape)} with strides {values.stride()}"
        )
    if q.dtype != keys.dtype:
        raise ValueError(f"q of {q.dtype} and K of {keys.dtype} must be of one type")
    if q.shape[1] % keys.shape[1] or q.shape[2] != keys.shape[3]:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(keys.shape)}")
    if q.stride(2) != 1 or keys.stride(3) != 1:
        raise ValueError(f"the numbers of a head must be adjacent: strides {q.stride()} of q, {keys.stride()} of K")
    if len(block_tables) != len(seq_lens) or block_tables.stride(-1) != 1:
        raise ValueError(f"block tables {list(block_tables.shape)} for {len(seq_lens)} sequences, row by row")
