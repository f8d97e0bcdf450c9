"""The online softmax over tiles of keys (Milakov and Gimelshein, 2018), in powers of two."""

import math

import triton
import triton.language as tl

_LOG2_E = math.log2(math.e)

#: The interpreter would multiply the bits of bfloat16 numbers; it is given the numbers as float32.
_WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """`scale` and `cap` of `scores`, which turn q k into the exponent of two that softmax is made of."""
    if soft_cap is None:
        return scale * _LOG2_E, None
    return scale / soft_cap, soft_cap * _LOG2_E


@triton.jit
def _dot(a, b, accumulator):
    """accumulator + a b in float32; `input_precision` keeps float32 from being rounded to tensor-core formats."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def scores(q, k, scale, cap, DOT: tl.constexpr):
    """`[rows, tokens]` float32: `q` `[rows, cols]` times `k` `[cols, tokens]`, scaled and, unless `cap` is None,
    capped: cap tanh(scale q k).
    """
    if DOT:
        result = _dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32)) * scale
    else:
        result = tl.sum(q.to(tl.float32)[:, :, None] * k.to(tl.float32)[None, :, :], axis=1) * scale
    if cap is not None:
        result = cap * (1 - 2 / (tl.exp(2 * result) + 1))  # tanh, which triton has not
    return result


@triton.jit
def accumulate(scored, v, best, total, weighted, DOT: tl.constexpr):
    """Add a tile to the running softmax: `best` and `total` `[rows]`, `weighted` `[rows, cols]`, all float32.

    `scored` `[rows, tokens]` is minus infinity for a key that a row does not see.
    """
    raised = tl.maximum(best, tl.max(scored, 1))
    # A row that has seen no key yet keeps a maximum of minus infinity; against zero its weights and its correction
    # come out as 0 instead of as NaN.
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    correction = tl.exp2(best - anchor)
    weights = tl.exp2(scored - anchor[:, None])
    total = total * correction + tl.sum(weights, 1)
    weighted = weighted * correction[:, None]
    if DOT:
        weighted = _dot(weights.to(v.dtype), v, weighted)
    else:
        weighted += tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], axis=1)
    return raised, total, weighted


@triton.jit
def normalised(total, weighted):
    """`[rows, cols]`: the weighted values over the sum of their weights; 0 for a row that saw no key."""
    return weighted / tl.where(total == 0, 1.0, total)[:, None]
