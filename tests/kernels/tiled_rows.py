"""Rows in tiles of 16 by 32 elements, as tiles.hpp has them."""

from __future__ import annotations

import torch


def put_in_tiles(x: torch.Tensor) -> torch.Tensor:
    """`[rows, size]` in tiles; the rows that the last ones have beyond are NaN."""
    rows, size = x.shape
    missing = torch.full((-rows % 16, size), float("nan"), dtype=x.dtype)
    return torch.cat([x, missing]).view(-1, 16, size // 32, 32).transpose(1, 2).contiguous()


def take_from_tiles(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """The first `rows` rows, one behind the other."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1] * 32)[:rows]
