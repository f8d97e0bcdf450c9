"""Attention of one query token per sequence over its blocks: PagedAttention (Kwon et al., 2023), split over the
sequence as Flash-Decoding (Dao et al., 2023) does.
"""

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

#: The second pass holds a head's result from every split at once.
_MOST_SPLITS = 64
#: With fewer, a program and its part of the second pass cost more than they save.
_LEAST_TOKENS_PER_SPLIT = 256
#: Of K, and of V. A program holds two tiles of each, one in use and one on its way. Three programs then fit in the
#: shared memory of a Hopper processor, and two in the 100 KB that processors for desktops and workstations have.
_TILE_BYTES, _SMALL_TILE_BYTES = 16 * 1024, 8 * 1024
_SMALL_ARCHITECTURES = (86, 89, 120, 121)


@triton.jit(do_not_specialize=["table_stride", "split_tokens", "splits"])
def _decode(
    q, keys, values, block_tables, seq_lens, query_start, out, partial, partial_log,
    scale, cap, window, table_stride, split_tokens, splits,
    q_stride, q_head_stride, block_stride, head_stride, slot_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One (sequence, KV head, split): the group's query heads are the rows that share each tile of K and V."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = sequence
    if query_start is not None:
        token = tl.load(query_start + sequence)
        if tl.load(query_start + sequence + 1) - token != 1:
            return

    stop = tl.load(seq_lens + sequence)
    start = 0
    if window is not None:
        start = tl.maximum(stop - window, 0)
    if SPLIT:
        start += split * split_tokens
        if start >= stop:
            return  # the second pass reads as many splits as the sequence fills
        stop = tl.minimum(start + split_tokens, stop)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    heads = kv_head * GROUP + rows
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q + token.to(tl.int64) * q_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLS], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    begin = first_of_tile(start, BLOCK_SIZE, TILE)
    blocks = look_up(table, begin, stop, BLOCK_SIZE, TILE)
    for first in range(begin, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        k, v = load_keys_and_values(
            keys + kv_head.to(tl.int64) * head_stride, values + kv_head.to(tl.int64) * head_stride,
            blocks, first, stop, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, COLS, TILE,
        )  # fmt: skip
        blocks = look_up(table, first + TILE, stop, BLOCK_SIZE, TILE)
        seen = tokens < stop
        if SPLIT or window is not None:
            seen = seen & (tokens >= start)
        scored = tl.where(seen[None, :], scores(queries, k, scale, cap, DOT), float("-inf"))
        best, total, weighted = accumulate(scored, v, best, total, weighted, DOT)
    result = normalised(total, weighted)

    if SPLIT:
        row = (sequence * tl.num_programs(1) * GROUP + heads).to(tl.int64) * splits + split
        tl.store(partial + row[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(partial_log + row, best + tl.log2(total), mask=rows < GROUP)
    else:
        out_at = out + token.to(tl.int64) * out_stride + heads[:, None] * out_head_stride + dims[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["split_tokens", "splits"])
def _combine(
    partial, partial_log, seq_lens, query_start, out, window, split_tokens, splits, out_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One (sequence, query head): the splits' results, each weighted by the sum of its weights."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = sequence
    if query_start is not None:
        token = tl.load(query_start + sequence)
        if tl.load(query_start + sequence + 1) - token != 1:
            return
    length = tl.load(seq_lens + sequence)
    if window is not None:
        length = tl.minimum(length, window)

    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, COLS)
    filled = split < tl.cdiv(length, split_tokens)
    row = (sequence * tl.num_programs(1) + head).to(tl.int64) * splits + split
    logs = tl.load(partial_log + row, mask=filled, other=float("-inf"))
    best = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(best == float("-inf"), 0.0, best))
    inside = filled[:, None] & (dims < HEAD_DIM)[None, :]
    results = tl.load(partial + row[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(results * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    out_at = out + token.to(tl.int64) * out_stride + head * out_head_stride + dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def plan_split(tokens: int, longest: int, kv_heads: int, device: torch.device) -> int | None:
    """How many tokens each program of `paged_decode` should take, or None for a whole sequence.

    The `tokens` of all sequences together are shared out over two programs for each of the GPU's processors, so
    that one long sequence among short ones does not delay the others.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    share = max(_LEAST_TOKENS_PER_SPLIT, tokens * kv_heads // (2 * processors))
    return None if share >= longest else share


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    longest: int | None = None,
    query_start: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last token over the sequence, its own K and V included.

    `q` `[B, heads, head_dim]`; `keys`, `values` `[blocks, kv_heads, block_size, head_dim]`; `block_tables`
    `[B, max_blocks]` int32; `seq_lens` `[B]` int32, where 0 gives zeros. `window`: the token sees itself and the
    `window - 1` before it. Returns `[B, heads, head_dim]`, or writes to `out`.

    `split_tokens` splits a sequence among programs (see `plan_split`); `longest`, which says that no sequence is
    longer, then spares programs. With `query_start` `[B + 1]` int32, `q` `[T, heads, head_dim]` is a ragged batch:
    the sequences with one query are computed, the rows of `out` of the others left as they are.

    Raises ValueError for shapes or strides that do not fit together.
    """
    check_attention(q, keys, values, block_tables, seq_lens)
    out = q.new_empty(q.shape) if out is None else out
    batch, (_, heads, head_dim) = len(seq_lens), q.shape
    if batch == 0:
        return out
    kv_heads, block_size = keys.shape[1:3]
    group, cols = heads // kv_heads, padded_dim(head_dim)
    # Tensor cores are idle while 16-bit K and V stream in, so that padding rows to their shape costs nothing. In
    # float32 padding costs time, and one or two rows are faster multiplied and summed.
    dot = q.element_size() == 2 or group > 2
    tile_bytes = _SMALL_TILE_BYTES if architecture() in _SMALL_ARCHITECTURES else _TILE_BYTES
    longest = min(longest or block_tables.shape[1] * block_size, window or (1 << 30))
    split_tokens = max(split_tokens or longest, -(-longest // _MOST_SPLITS), 1)
    splits = max(1, -(-longest // split_tokens))
    partial = partial_log = None
    if splits > 1:
        partial = q.new_empty((batch, heads, splits, head_dim), dtype=torch.float32)
        partial_log = q.new_empty((batch, heads, splits), dtype=torch.float32)
    score_scale, cap = score_factors(scale, soft_cap)
    _decode[(batch, kv_heads, splits)](
        *(q, keys, values, block_tables, seq_lens, query_start, out, partial, partial_log),
        *(score_scale, cap, window, block_tables.stride(0), split_tokens, splits),
        *(*q.stride()[:2], *keys.stride()[:3], *out.stride()[:2]),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=max(16 if dot else 1, triton.next_power_of_2(group)),
        COLS=cols,
        TILE=tile_tokens(cols, q.element_size(), 128, tile_bytes),
        SPLIT=splits > 1,
        DOT=dot,
        num_warps=4 if q.element_size() == 2 else 8,
        num_stages=3,  # two tiles of K and V
    )
    if splits > 1:
        _combine[(batch, heads)](
            *(partial, partial_log, seq_lens, query_start, out, window, split_tokens, splits, *out.stride()[:2]),
            HEAD_DIM=head_dim,
            COLS=cols,
            SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out
