"""Shared by the readable backends: a sequence's blocks, and scores of queries against keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvlab.attention.base import AttentionSpec
from kvlab.kv.view import CacheView


class BlockOfTokens(NamedTuple):
    """A sequence's tokens in one block: `k`, `v` `[kv_heads, keys, head_dim]`; the first is at position `first`."""

    k: torch.Tensor
    v: torch.Tensor
    first: int


def blocks_of(view: CacheView, layer: int, sequence: int) -> Iterator[BlockOfTokens]:
    """A sequence's blocks in logical order, the last one cut off at the sequence's end. Nothing is copied, except
    int8, which is converted to float32.
    """
    for entry, block in enumerate(view.blocks(sequence)):
        first = entry * view.block_size
        yield BlockOfTokens(*view.storage.read(layer, block, view.lengths[sequence] - first), first)


def attention_scores(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, first_key: int, spec: AttentionSpec
) -> torch.Tensor:
    """`[kv_heads, group, n, keys]` float32 scores of `q` `[n, heads, head_dim]` at `positions` `[n]` against `k`
    `[kv_heads, keys, head_dim]`, whose first key is at position `first_key`; minus infinity for a key that a
    query does not see.
    """
    grouped = q.float().reshape(len(q), spec.num_kv_heads, spec.group, spec.head_dim)
    scores = torch.einsum("nhgd,hld->hgnl", grouped, k.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    keys_at = torch.arange(first_key, first_key + k.shape[1], device=q.device)
    hidden = torch.zeros(len(q), len(keys_at), dtype=torch.bool, device=q.device)
    if spec.causal:
        hidden |= keys_at[None, :] > positions[:, None]
    if spec.sliding_window is not None:
        hidden |= keys_at[None, :] <= positions[:, None] - spec.sliding_window
    return scores.masked_fill(hidden, float("-inf"))


def weighted_values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, group, n, head_dim]`: `v` `[kv_heads, keys, head_dim]` summed with `weights`
    `[kv_heads, group, n, keys]`.
    """
    return torch.einsum("hgnl,hld->hgnd", weights, v.float())


def heads_last(out: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, group, n, head_dim]` as the `[n, heads, head_dim]` that a backend returns."""
    return out.permute(2, 0, 1, 3).flatten(1, 2)
