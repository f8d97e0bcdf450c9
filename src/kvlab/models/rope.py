"""Rotary position embedding: the angles of each token's own position."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvlab.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` float32: radians per position of each pair of channels."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / rope.theta**exponents
    if rope.factor == 1.0:
        return inverse
    if rope.original_max_position is None:
        return inverse / rope.factor
    wavelength = 2 * math.pi / inverse
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: stretched by the factor; 1: unchanged
    return (1 - blend) * inverse / rope.factor + blend * inverse


class Angles(NamedTuple):
    """Cosine and signed sine of all positions, `[positions, head_dim]`, or of tokens, `[T, 1, head_dim]`."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def at(self, positions: torch.Tensor) -> Angles:
        """Those of the tokens' `positions` `[T]`, of the tables of all positions."""
        return Angles(*(table[positions].unsqueeze(1) for table in self))


class RotaryEmbedding:
    """Tables of cosine and sine for positions up to `max_positions`, `[positions, head_dim]` each."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim))
        angles = torch.cat([angles, angles], dim=-1)
        # The half-rotation's sign is folded into the sine, so that applying it needs no negation.
        sign = torch.ones(head_dim)
        sign[: head_dim // 2] = -1
        tables = (table.to(device=device, dtype=dtype) for table in (angles.cos(), angles.sin() * sign))
        self.tables = Angles(*tables)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head of `x` `[T, heads, head_dim]` by its token's angles: x cos + (-x2, x1) sin."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin
