"""Attention over blocks in two passes: the maximum and the sum first, then the weighted values."""

from __future__ import annotations

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionSpec, Support
from kvlab.attention.scores import attention_scores, blocks_of, heads_last, weighted_values
from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("safe_softmax")
class SafeSoftmaxAttention:
    """Softmax made safe by subtracting the maximum, which the first pass over a sequence's blocks finds.

    No tensor as long as the sequence is needed: each pass reads each block once. Computed in float32.
    """

    name = "safe_softmax"

    def supports(self, spec: AttentionSpec) -> Support:
        """Every spec."""
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionBackend."""
        out = torch.empty_like(q)
        for sequence in range(view.num_sequences):
            new = slice(view.starts[sequence], view.starts[sequence + 1])
            queries, positions = q[new], view.positions[new]
            shape = (spec.num_kv_heads, spec.group, len(positions), 1)

            maximum = torch.full(shape, float("-inf"), device=q.device)
            for block in blocks_of(view, layer, sequence):
                scores = attention_scores(queries, block.k, positions, block.first, spec)
                maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))

            total = torch.zeros(shape, device=q.device)
            weighted = torch.zeros(*shape[:-1], spec.head_dim, device=q.device)
            for block in blocks_of(view, layer, sequence):
                scores = attention_scores(queries, block.k, positions, block.first, spec)
                weights = torch.exp(scores - maximum)
                total += weights.sum(dim=-1, keepdim=True)
                weighted += weighted_values(weights, block.v)
            out[new] = heads_last(weighted / total).to(q.dtype)
        return out
