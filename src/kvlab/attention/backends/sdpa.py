"""PyTorch's scaled_dot_product_attention over each sequence's gathered K and V."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("sdpa")
class SdpaAttention(AttentionBackend):
    """Gathers a sequence into a buffer small enough to stay in the processor's cache, then calls PyTorch.

    The query heads of a group have a dimension of their own, over which K and V have stride 0, so that K and V are
    not repeated in memory.
    """

    name = "sdpa"
    preference = 10

    def supports(self, spec: AttentionSpec) -> Support:
        if spec.soft_cap is not None:
            return Support(False, "PyTorch's attention has no soft cap")
        if not spec.causal:
            return Support(False, "only causal attention")
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        out = torch.empty_like(q)
        kv_heads, group, head_dim = spec.num_kv_heads, spec.group, spec.head_dim
        for sequence, (length, new) in enumerate(zip(view.lengths, view.num_new, strict=True)):
            rows = slice(view.starts[sequence], view.starts[sequence + 1])
            # The first query of this step sees furthest back.
            first = 0 if spec.sliding_window is None else max(0, length - new - spec.sliding_window + 1)
            k, v = (x.to(q.dtype) for x in view.gather(layer, sequence, first))  # formats come back as float32
            if new == 1:
                # The heads of the group take the place of queries: one query token needs no mask.
                heads = q[rows].view(1, kv_heads, group, head_dim)
                result = scaled_dot_product_attention(heads, k[None], v[None], scale=spec.scale)
                # On a GPU the heads of a result may lie further apart than its queries.
                out[rows] = result.reshape(1, spec.num_heads, head_dim)
                continue
            shape = (kv_heads, group, k.shape[1], head_dim)
            grouped = q[rows].view(new, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            mask = self._mask(length, new, k.shape[1], spec, q.device)
            result = scaled_dot_product_attention(
                grouped,
                k[:, None].expand(shape),
                v[:, None].expand(shape),
                attn_mask=mask,
                is_causal=mask is None,
                scale=spec.scale,
            )
            out[rows] = result.permute(2, 0, 1, 3).reshape(new, spec.num_heads, head_dim)
        return out

    @staticmethod
    def _mask(
        length: int, new: int, visible: int, spec: AttentionSpec, device: torch.device
    ) -> torch.Tensor | None:
        """`[new, visible]`, True where a query sees a key; None where plain causality says the same."""
        window = spec.sliding_window
        if new == length and (window is None or window >= length):
            return None
        queries = torch.arange(length - new, length, device=device)[:, None]
        keys = torch.arange(length - visible, length, device=device)[None, :]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return mask
