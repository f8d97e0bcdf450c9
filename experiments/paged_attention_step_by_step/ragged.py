"""Version 4: every token of every sequence in one call, column after column of the block tables."""

from __future__ import annotations

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("ragged")
class RaggedAttention(AttentionBackend):
    """The online softmax for all T tokens of a step at once. There is no loop over sequences."""

    name = "ragged"

    def supports(self, spec: AttentionSpec) -> Support:
        """Causal attention over whole sequences, K and V not in int8."""
        ok = spec.causal and spec.sliding_window is None and spec.soft_cap is None and not spec.formats
        return Support(ok, "" if ok else "only causal attention without window, soft cap and int8")

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        keys, values = view.keys(layer), view.values(layer)  # all blocks [blocks, kv_heads, block_size, head_dim]
        size, offsets = view.block_size, torch.arange(view.block_size)
        sequence_of = torch.repeat_interleave(torch.arange(view.num_sequences), view.query_start.diff())  # [T]
        tables, positions = view.block_tables[sequence_of], view.positions  # [T, width], [T]
        grouped = (
            q.float().unflatten(1, (spec.num_kv_heads, spec.group)) * spec.scale
        )  # [T, kv_heads, group, head_dim]
        maximum = torch.full((*grouped.shape[:3], 1), float("-inf"))
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(grouped)
        for column in range(tables.shape[1]):
            rows = torch.nonzero(positions >= column * size)[:, 0]  # the tokens that see a key of this column
            blocks = tables[rows, column].long()  # a block for each of them, of its own sequence
            scores = torch.einsum("thgd,thkd->thgk", grouped[rows], keys[blocks].float())
            later = column * size + offsets > positions[rows, None]
            scores = scores.masked_fill(later[:, None, None], float("-inf"))
            raised = torch.maximum(maximum[rows], scores.amax(-1, keepdim=True))
            correction = torch.exp(maximum[rows] - raised)
            weights = torch.exp(scores - raised)
            total[rows] = total[rows] * correction + weights.sum(-1, keepdim=True)
            seen = torch.einsum("thgk,thkd->thgd", weights, values[blocks].float())
            weighted[rows] = weighted[rows] * correction + seen
            maximum[rows] = raised
        return (weighted / total).flatten(1, 2).to(q.dtype)
