"""Triton kernels that read K and V straight from the blocks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support

if TYPE_CHECKING:
    import torch

    from kvlab.kv.view import CacheView

_WIDEST_HEAD = 256
_LARGEST_GROUP = 128


@ATTENTION_BACKENDS.register("triton")
class TritonAttention(AttentionBackend):
    """A decode kernel for the sequences with one new token, a prefill kernel for those with more.

    A step may have both, in any order. Each kernel finds its sequences in the metadata on the device and leaves the
    rows of the others alone, so that batches need not be split. The prefill kernel could compute all sequences, but
    it has a single program for all keys of a sequence with one query, where the decode kernel has as many as keep
    the GPU busy.
    """

    name = "triton"
    preference = 20
    is_kernel = True

    def supports(self, spec: AttentionSpec) -> Support:
        if find_spec("triton") is None:
            return Support(False, "triton is not installed")
        if not spec.causal:
            return Support(False, "only causal attention")
        if spec.formats:
            return Support(False, f"does not read K and V in {' and '.join(sorted(spec.formats))}")
        if spec.head_dim > _WIDEST_HEAD or spec.group > _LARGEST_GROUP:
            return Support(
                False, f"heads of at most {_WIDEST_HEAD} numbers, and {_LARGEST_GROUP} query heads to a KV head"
            )
        if os.environ.get("TRITON_INTERPRET") == "1":
            return Support(True, "interpreted, which is for tests")
        if spec.device.partition(":")[0] != "cuda":
            return Support(False, "needs a GPU; TRITON_INTERPRET=1 runs it interpreted on a CPU")
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        # Imported here, since only this backend needs triton.
        from kvlab.kernels.triton.decode import paged_decode, plan_split
        from kvlab.kernels.triton.prefill import paged_prefill

        out, window = q.new_empty(q.shape), spec.sliding_window
        cache = view.keys(layer), view.values(layer), view.block_tables, view.seq_lens
        options: dict[str, Any] = {"scale": spec.scale, "window": window, "soft_cap": spec.soft_cap, "out": out}
        singles = view.num_new.count(1)
        mixed = singles < view.num_sequences
        if singles:
            longest, tokens = max(view.lengths), sum(view.lengths)
            if window is not None:
                longest = min(longest, window)
                tokens = min(tokens, longest * view.num_sequences)
            split = plan_split(tokens, longest, spec.num_kv_heads, q.device)
            start = view.query_start if mixed else None
            paged_decode(q, *cache, split_tokens=split, longest=longest, query_start=start, **options)
        if mixed:
            paged_prefill(q, *cache, view.query_start, least=2, **options)
        return out
