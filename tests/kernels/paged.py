"""Sequences whose K and V lie in blocks scattered over a cache that holds NaN everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NAN = float("nan")

#: Of the largest number expected.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Paged:
    """`k` and `v` are each sequence's own, `[length, kv_heads, head_dim]`; the rest is what kernels take."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments that every attention kernel takes after the queries."""
        return self.keys, self.values, self.block_tables, self.seq_lens


def make_paged(
    lengths: Sequence[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Paged:
    """Sequences of random K and V. What a table has beyond its sequence's blocks is the id of a block of NaN."""
    needs = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needs) + 2
    ids = torch.randperm(num_blocks).tolist()
    keys = torch.full((num_blocks, kv_heads, block_size, head_dim), NAN, dtype=dtype)
    values = torch.full_like(keys, NAN)
    tables = torch.full((len(lengths), max(1, *needs) + 1), ids.pop(), dtype=torch.int32)
    k, v = ([torch.randn(length, kv_heads, head_dim).to(dtype) for length in lengths] for _ in range(2))
    for row, need in enumerate(needs):
        blocks = torch.tensor([ids.pop() for _ in range(need)], dtype=torch.int64)
        tables[row, :need] = blocks.int()
        positions = torch.arange(lengths[row])
        where = blocks[positions // block_size], slice(None), positions % block_size
        keys[where], values[where] = k[row], v[row]
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Paged(k, v, *(tensor.to(device) for tensor in (keys, values, tables, lens)))


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Softmax(q k) v in double precision; `q` `[n, heads, head_dim]` are the last n of a sequence's tokens, `k` and
    `v` `[length, kv_heads, head_dim]`. Zeros for a sequence of no tokens.
    """
    length, kv_heads, head_dim = k.shape
    if length == 0:
        return torch.zeros(q.shape, dtype=torch.float64)
    grouped = q.cpu().double().view(len(q), kv_heads, -1, head_dim)
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, k.double()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions, keys = torch.arange(length - len(q), length)[:, None], torch.arange(length)[None, :]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgnl,lhd->nhgd", weights, v.double()).reshape(q.shape)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of `found`'s type, relative to the largest number expected."""
    tolerance = TOLERANCE[found.dtype] * max(1e-30, expected.abs().max().item())
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=0)


def bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies that compare equal only to the same bits, NaN included."""
    return [
        tensor.cpu().clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32) for tensor in tensors
    ]


def unchanged(before: Sequence[torch.Tensor], *tensors: torch.Tensor) -> bool:
    """Whether the tensors have the bits they had."""
    return all(torch.equal(old, new) for old, new in zip(before, bits(*tensors), strict=True))
