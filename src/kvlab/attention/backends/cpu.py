"""The native CPU kernel: K and V straight from the blocks, read once for a whole query group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.errors import KernelError

if TYPE_CHECKING:
    import torch

    from kvlab.kv.view import CacheView


@ATTENTION_BACKENDS.register("cpu")
class CpuAttention(AttentionBackend):
    """One call for the whole ragged batch: decode, prefill and chunks together."""

    name = "cpu"
    preference = 30
    is_kernel = True

    def supports(self, spec: AttentionSpec) -> Support:
        """The first call on a machine compiles the kernel."""
        if spec.device.partition(":")[0] != "cpu":
            return Support(False, f"runs on a CPU, not on {spec.device}")
        if spec.dtype not in ("float32", "bfloat16"):
            return Support(False, f"computes float32 and bfloat16, not {spec.dtype}")
        if not spec.causal:
            return Support(False, "only causal attention")
        from kvlab.kernels.cpu.native import load, load_formats  # this late: a plan imports no torch

        try:
            (load_formats if spec.formats else load)()
        except KernelError as error:
            return Support(False, str(error))
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        from kvlab.kernels.cpu.attention import paged_attention

        return paged_attention(
            q,
            view.keys(layer),
            view.values(layer),
            view.block_tables,
            view.seq_lens,
            view.query_start,
            scale=spec.scale,
            window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            key_scales=view.key_scales(layer),
            value_scales=view.value_scales(layer),
        )
