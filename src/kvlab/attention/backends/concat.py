"""Textbook attention: concatenate a sequence's blocks, then softmax(Q K^T) V. The reference for the others."""

from __future__ import annotations

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionSpec, Support
from kvlab.attention.scores import attention_scores, blocks_of, heads_last, weighted_values
from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("concat")
class ConcatAttention:
    """Plain attention, one sequence after another, in float32."""

    name = "concat"

    def supports(self, spec: AttentionSpec) -> Support:
        """Every spec."""
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionBackend."""
        out = torch.empty_like(q)
        for sequence in range(view.num_sequences):
            new = slice(view.starts[sequence], view.starts[sequence + 1])
            blocks = list(blocks_of(view, layer, sequence))
            k = torch.cat([block.k for block in blocks], dim=1)
            v = torch.cat([block.v for block in blocks], dim=1)
            weights = torch.softmax(attention_scores(q[new], k, view.positions[new], 0, spec), dim=-1)
            out[new] = heads_last(weighted_values(weights, v)).to(q.dtype)
        return out
