"""Attention over blocks in one pass, with a running maximum."""

from __future__ import annotations

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionSpec, Support
from kvlab.attention.scores import attention_scores, blocks_of, heads_last, weighted_values
from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("online_softmax")
class OnlineSoftmaxAttention:
    """The online softmax (Milakov and Gimelshein, 2018) as FlashAttention and PagedAttention use it: each block
    is read once, and what was summed so far is rescaled whenever a block raises the maximum. Computed in float32.
    """

    name = "online_softmax"

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
            total = torch.zeros(shape, device=q.device)
            weighted = torch.zeros(*shape[:-1], spec.head_dim, device=q.device)
            for block in blocks_of(view, layer, sequence):
                scores = attention_scores(queries, block.k, positions, block.first, spec)
                raised = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
                # A query that has seen no key yet (its window begins later) keeps a maximum of minus infinity. With
                # an anchor of zero its weights and its correction are 0 instead of NaN.
                anchor = raised.masked_fill(raised == float("-inf"), 0)
                correction = torch.exp(maximum - anchor)
                weights = torch.exp(scores - anchor)
                total = total * correction + weights.sum(dim=-1, keepdim=True)
                weighted = weighted * correction + weighted_values(weights, block.v)
                maximum = raised
            out[new] = heads_last(weighted / total).to(q.dtype)
        return out
