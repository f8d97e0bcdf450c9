"""Rotary position embedding (Su et al., 2021), in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_heads(
    x, head_stride, lower_cos, upper_cos, lower_sin, upper_sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rotate the HEADS heads of one token at `x`; both halves are read before either is written."""
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    mask = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    lower_at = x + heads[:, None] * head_stride + dims[None, :]
    lower = tl.load(lower_at, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(lower_at + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated_lower = lower * lower_cos[None, :] + upper * lower_sin[None, :]
    rotated_upper = upper * upper_cos[None, :] + lower * upper_sin[None, :]
    tl.store(lower_at, rotated_lower.to(x.dtype.element_ty), mask=mask)
    tl.store(lower_at + HALF, rotated_upper.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _rotary(
    q, k, cos, sin, rows,
    q_stride, q_head_stride, k_stride, k_head_stride, cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One token: its angles are read once for all heads of q and k."""
    token = tl.program_id(0).to(tl.int64)
    row = token
    if rows is not None:
        row = tl.load(rows + token).to(tl.int64)
    dims = tl.arange(0, COLS)
    mask = dims < HALF
    lower_cos = tl.load(cos + row * cos_stride + dims, mask=mask, other=0.0).to(tl.float32)
    upper_cos = tl.load(cos + row * cos_stride + dims + HALF, mask=mask, other=0.0).to(tl.float32)
    lower_sin = tl.load(sin + row * sin_stride + dims, mask=mask, other=0.0).to(tl.float32)
    upper_sin = tl.load(sin + row * sin_stride + dims + HALF, mask=mask, other=0.0).to(tl.float32)
    q += token * q_stride
    k += token * k_stride
    _rotate_heads(q, q_head_stride, lower_cos, upper_cos, lower_sin, upper_sin, Q_HEADS, HALF, Q_ROWS, COLS)
    _rotate_heads(k, k_head_stride, lower_cos, upper_cos, lower_sin, upper_sin, K_HEADS, HALF, K_ROWS, COLS)


def rotate_in_place(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Rotate `q` `[T, heads, head_dim]` and `k` `[T, kv_heads, head_dim]`: x cos + (x2, x1) sin.

    `cos` and `sin` `[n, head_dim]`, the sine negative in its first half, as `models/rope.py` makes them. `rows`
    `[T]` says which row each token takes: its position where all share one table. Without it token t takes row t.
    Computed in float32.

    Raises ValueError for shapes or strides that do not fit together.
    """
    count, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if (len(k), k.shape[2]) != (count, head_dim) or cos.shape != sin.shape or cos.shape[1:] != (head_dim,):
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, cosines {list(cos.shape)} and sines {list(sin.shape)} "
            "do not fit together"
        )
    if len(cos if rows is None else rows) != count:
        raise ValueError(f"angles of {len(cos if rows is None else rows)} tokens for {count}")
    if head_dim % 2 or {x.stride(-1) for x in (q, k, cos, sin)} != {1}:
        raise ValueError(f"heads of {head_dim}: must be even, and a head's numbers and a row's angles adjacent")
    if count == 0:
        return
    _rotary[(count,)](
        *(q, k, cos, sin, rows, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0)),
        Q_HEADS=heads,
        K_HEADS=kv_heads,
        HALF=head_dim // 2,
        Q_ROWS=triton.next_power_of_2(heads),
        K_ROWS=triton.next_power_of_2(kv_heads),
        COLS=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
