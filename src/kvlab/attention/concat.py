"""Attention as a textbook has it: join a sequence's blocks, then softmax(Q K^T) V. The oracle of the others."""

from __future__ import annotations

import torch

from kvlab.attention.base import AttentionSpec, Support
from kvlab.kv.view import CacheView


class ConcatAttention:
    """Plain attention, one sequence after another, in float32."""

    name = "concat"

    def supports(self, spec: AttentionSpec) -> Support:
        """Every spec."""
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionBackend."""
        out = torch.empty_like(q)
        keys, values = view.keys(layer), view.values(layer)
        for sequence, length in enumerate(view.lengths):
            new = slice(view.starts[sequence], view.starts[sequence + 1])
            blocks = view.blocks(sequence)
            k = torch.cat([keys[block] for block in blocks], dim=1)[:, :length]
            v = torch.cat([values[block] for block in blocks], dim=1)[:, :length]
            out[new] = self._attend(q[new], k, v, view.positions[new], spec)
        return out

    @staticmethod
    def _attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """`q` `[n, heads, head_dim]` at `positions` `[n]` over `k`, `v` `[kv_heads, length, head_dim]`."""
        n = len(q)
        grouped = q.float().reshape(n, spec.num_kv_heads, spec.group, spec.head_dim)
        scores = torch.einsum("nhgd,hld->hgnl", grouped, k.float()) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        keys_at = torch.arange(k.shape[1], device=q.device)
        hidden = torch.zeros(n, len(keys_at), dtype=torch.bool, device=q.device)
        if spec.causal:
            hidden |= keys_at[None, :] > positions[:, None]
        if spec.sliding_window is not None:
            hidden |= keys_at[None, :] <= positions[:, None] - spec.sliding_window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out = torch.einsum("hgnl,hld->nhgd", weights, v.float())
        return out.reshape(n, spec.num_heads, spec.head_dim).to(q.dtype)
