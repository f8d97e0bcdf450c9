"""Causal attention of a ragged batch over blocks: FlashAttention-2 (Dao, 2023) with a block table."""

import torch
import triton
import triton.language as tl

from kvlab.kernels.triton.pages import (
    architecture,
    check_attention,
    first_of_tile,
    load_keys_and_values,
    look_up,
    padded_dim,
    tile_tokens,
)
from kvlab.kernels.triton.softmax import accumulate, normalised, score_factors, scores

#: Of K, and of V: less than in decode, as scores of a tile take registers of each row.
_TILE_BYTES = 8 * 1024


@triton.jit(do_not_specialize=["table_stride", "sequences"])
def _prefill(
    q, keys, values, block_tables, seq_lens, query_start, out,
    scale, cap, window, table_stride, sequences,
    q_stride, q_head_stride, block_stride, head_stride, slot_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, SEQUENCES: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One (tile of queries, KV head): rows are QUERIES tokens times the GROUP query heads of the KV head.

    Sequence i begins at tile `query_start[i] // QUERIES + i`. That leaves room for the tiles of each, of which the
    last may be empty, and needs no list made on the host: a program counts the sequences that begin before it.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    index = tl.arange(0, SEQUENCES)
    there = index < sequences
    first_tiles = tl.load(query_start + index, mask=there, other=0) // QUERIES + index
    sequence = tl.sum(((first_tiles <= tile) & there).to(tl.int32), 0) - 1
    begin = tl.load(query_start + sequence)
    new = tl.load(query_start + sequence + 1) - begin
    first_query = (tile - begin // QUERIES - sequence) * QUERIES
    if (first_query >= new) | (new < LEAST):
        return

    length = tl.load(seq_lens + sequence)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    query = first_query + rows // GROUP
    position = length - new + query
    heads = kv_head * GROUP + rows % GROUP
    real = (rows < QUERIES * GROUP) & (query < new)
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    token = (begin + query).to(tl.int64)
    q_at = q + token[:, None] * q_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)

    # The keys from the first that the first query sees to the last that the last query sees.
    stop = length - new + tl.minimum(first_query + QUERIES, new)
    start = 0
    if window is not None:
        start = first_of_tile(tl.maximum(length - new + first_query - window + 1, 0), BLOCK_SIZE, TILE)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLS], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    blocks = look_up(table, start, stop, BLOCK_SIZE, TILE)
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        k, v = load_keys_and_values(
            keys + kv_head.to(tl.int64) * head_stride, values + kv_head.to(tl.int64) * head_stride,
            blocks, first, stop, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, COLS, TILE,
        )  # fmt: skip
        blocks = look_up(table, first + TILE, stop, BLOCK_SIZE, TILE)
        ahead = position[:, None] - tokens[None, :]
        visible = ahead >= 0
        if window is not None:
            visible = visible & (ahead < window)
        scored = tl.where(visible, scores(queries, k, scale, cap, True), float("-inf"))
        best, total, weighted = accumulate(scored, v, best, total, weighted, True)

    # The compiler cannot know that what is read again is the same; else it would hold the rows' places meanwhile.
    again = tl.arange(0, ROWS) + (tl.load(query_start + sequence) - begin)
    query = first_query + again // GROUP
    token = (begin + query).to(tl.int64)
    heads = kv_head * GROUP + again % GROUP
    inside = ((again < QUERIES * GROUP) & (query < new))[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = out + token[:, None] * out_stride + heads[:, None] * out_head_stride + dims[None, :]
    tl.store(out_at, normalised(total, weighted).to(out.dtype.element_ty), mask=inside)


def paged_prefill(
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
    least: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's new tokens over its cached tokens and, causally, over themselves.

    `q` `[T, heads, head_dim]` is a flat batch in which sequence i has the rows from `query_start[i]` to
    `query_start[i + 1]` (`[B + 1]` int32), which may be none; they are the last of its `seq_lens[i]` tokens (`[B]`
    int32), whose K and V are in the cache already. `keys`, `values` `[blocks, kv_heads, block_size, head_dim]`;
    `block_tables` `[B, max_blocks]` int32. `window`: a token sees itself and the `window - 1` before it. Rows of
    sequences with fewer than `least` new tokens are left as they are. Returns `[T, heads, head_dim]`, or writes to
    `out`.

    Raises ValueError for shapes or strides that do not fit together.
    """
    check_attention(q, keys, values, block_tables, seq_lens)
    if len(query_start) != len(seq_lens) + 1:
        raise ValueError(f"{len(query_start)} entries of query_start for {len(seq_lens)} sequences")
    out = q.new_empty(q.shape) if out is None else out
    batch, (tokens, heads, head_dim) = len(seq_lens), q.shape
    if tokens == 0:
        return out
    kv_heads, block_size = keys.shape[1:3]
    group, cols = heads // kv_heads, padded_dim(head_dim)
    half = q.element_size() == 2
    # 128 rows read a tile of K and V half as often as 64, where the sequences have rows enough. wgmma and tcgen05
    # take queries from shared memory: two such programs share the registers of a processor, and one multiplies
    # while the other computes its softmax. mma.sync holds queries in registers, which fewer rows have room for.
    # More than 32 rows of float32 overflow them.
    streams = architecture() // 10 in (9, 10)
    wide = half and streams and cols <= 128 and tokens * group >= 128 * batch
    rows = 128 if wide else 64 if half and (streams or cols <= 128) else 32
    rows = max(rows, triton.next_power_of_2(group))
    queries = rows // group
    score_scale, cap = score_factors(scale, soft_cap)
    _prefill[(tokens // queries + batch, kv_heads)](
        *(q, keys, values, block_tables, seq_lens, query_start, out),
        *(score_scale, cap, window, block_tables.stride(0), batch),
        *(*q.stride()[:2], *keys.stride()[:3], *out.stride()[:2]),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        ROWS=rows,
        COLS=cols,
        TILE=tile_tokens(cols, q.element_size(), 32 if wide else 64, _TILE_BYTES),
        SEQUENCES=triton.next_power_of_2(batch),
        LEAST=least,
        num_warps=4 if half and rows <= 64 else 8,
        num_stages=3 if wide else 2,
        maxnreg=128 if wide else None,
    )
    return out
