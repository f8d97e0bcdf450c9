"""A tile of a sequence's K and V, read from its blocks."""

import torch
import triton
import triton.language as tl
from triton.runtime import driver

#: Blocks of a tile that are looked up one by one.
_MOST_SCALARS = 8


@triton.constexpr_function
def _scalars(block_size, tile):
    """How many blocks a tile can lie in, if it begins where one does and they are few; else 0."""
    if block_size % tile == 0:
        return 1
    return tile // block_size if tile % block_size == 0 and tile // block_size <= _MOST_SCALARS else 0


@triton.jit
def first_of_tile(token, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where a tile that has `token` may begin: in the same block, so that each block of the tile is whole."""
    aligned: tl.constexpr = min(BLOCK_SIZE, TILE)
    return token // aligned * aligned


@triton.jit
def look_up(table, first, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of a tile that begins at `first` (see `first_of_tile`): a scalar for each if they are few, else
    `[TILE]`; 0 from `stop` on.

    All threads load the same scalar. It needs no shared memory, no copy of a few bytes and no change of layout, and
    is one tile ahead of the copies of K and V, which need it for their addresses.
    """
    scalars: tl.constexpr = _scalars(BLOCK_SIZE, TILE)
    if scalars == 0:
        tokens = first + tl.arange(0, TILE)
        found = (tl.load(table + tokens // BLOCK_SIZE, mask=tokens < stop, other=0),)
    else:
        found = (tl.load(table + first // BLOCK_SIZE, mask=first < stop, other=0),)
        for index in tl.static_range(1, scalars):
            block = tl.load(table + first // BLOCK_SIZE + index, mask=first + index * BLOCK_SIZE < stop, other=0)
            found += (block,)  # type: ignore[assignment]  # a tuple of any length
    return found


@triton.jit
def load_keys_and_values(
    keys, values, blocks, first, stop, block_stride, slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """K `[COLS, TILE]` and V `[TILE, COLS]` of one head from token `first` on, in the `blocks` of `look_up`; 0
    from `stop` on and beyond the head.
    """
    tokens = first + tl.arange(0, TILE)
    dims = tl.arange(0, COLS)
    here, in_head = tokens < stop, dims < HEAD_DIM
    block = blocks[0]
    for index in tl.static_range(1, len(blocks)):
        block = tl.where(tl.arange(0, TILE) < index * BLOCK_SIZE, block, blocks[index])
    # A pool can have more than 2^31 numbers.
    rows = block.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * slot_stride
    k = tl.load(keys + rows[None, :] + dims[:, None], mask=in_head[:, None] & here[None, :], other=0.0)
    v = tl.load(values + rows[:, None] + dims[None, :], mask=here[:, None] & in_head[None, :], other=0.0)
    return k, v


def architecture() -> int:
    """Of the GPU that kernels are compiled for: 90 is compute capability 9.0, and what is interpreted instead."""
    return 90 if triton.knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def padded_dim(head_dim: int) -> int:
    """The width of a tile for heads of this size: a power of two, and what `tl.dot` needs at least."""
    padded: int = triton.next_power_of_2(head_dim)
    return max(16, padded)


def tile_tokens(cols: int, element_size: int, most: int, tile_bytes: int) -> int:
    """Tokens in a tile of K or V that should take `tile_bytes`, a power of two."""
    return max(16, min(most, tile_bytes // (cols * element_size)))


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
