"""RMSNorm (Zhang and Sennrich, 2019), with the residual addition before it in the same pass."""

import torch
import triton
import triton.language as tl

#: A program holds a whole row.
_WIDEST = 65536


@triton.jit
def _rms_norm(
    x, weight, residual, out, eps, x_stride, x_inner_stride, residual_stride,
    INNER: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One row: row r of x is at (r // INNER, r % INNER)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    mask = cols < WIDTH
    x_at = x + (row // INNER) * x_stride + (row % INNER) * x_inner_stride + cols
    numbers = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        residual_at = residual + row * residual_stride + cols
        total = numbers + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        # What is normed is what the next layer will read, rounding included.
        stored = total.to(residual.dtype.element_ty)
        tl.store(residual_at, stored, mask=mask)
        numbers = stored.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    weights = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + row * WIDTH + cols, (numbers * scale * weights).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None, offset: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; contiguous, in x's dtype.

    `x` `[T, width]` or `[T, heads, width]`; `weight` `[width]`, to which `offset` adds 1 (Gemma). With a `residual`
    `[T, width]`, `residual += x` comes first, in place, and the sum is normed.

    Raises ValueError for shapes or strides that do not fit together.
    """
    width = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    if x.dim() not in (2, 3) or weight.shape != (width,) or not 0 < width <= _WIDEST:
        raise ValueError(f"x {list(x.shape)} and a weight {list(weight.shape)}: up to {_WIDEST} in a row")
    if x.stride(-1) != 1 or weight.stride(0) != 1:
        raise ValueError(f"the numbers of a row must be adjacent: strides {x.stride()}")
    if residual is not None and (residual.shape != x.shape or x.dim() != 2 or residual.stride(1) != 1):
        raise ValueError(f"a residual {list(residual.shape)} for x {list(x.shape)}: must be equal, of rows")
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    cols, strides = triton.next_power_of_2(width), (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
    _rms_norm[(x.numel() // width,)](
        *(x, weight, residual, out, eps, *strides, 0 if residual is None else residual.stride(0)),
        INNER=inner,
        WIDTH=width,
        COLS=cols,
        OFFSET=1.0 if offset else 0.0,
        num_warps=min(16, max(1, cols // 512)),
    )
    return out
