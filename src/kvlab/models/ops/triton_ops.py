"""The decoder's arithmetic on a GPU: Triton where a fused kernel saves launches, PyTorch for the rest."""

from __future__ import annotations

import torch

from kvlab.kernels.triton.rms_norm import rms_norm
from kvlab.kernels.triton.rotary import rotate_in_place
from kvlab.kernels.triton.scatter import scatter_kv
from kvlab.kv.view import CacheView
from kvlab.models.ops.base import Angles, Norm
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import RotaryEmbedding


class TritonOps(TorchOps):
    """See Ops."""

    name = "triton"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See Ops."""
        return rms_norm(x, norm.weight, norm.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        return residual, rms_norm(x, norm.weight, norm.eps, residual=residual)

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        """See Ops."""
        return Angles(rotary.cos, rotary.sin)

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        """See Ops."""
        kv_heads = view.storage.spec.num_kv_heads
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        rotate_in_place(q, k, angles.cosine, angles.sine, view.positions)
        if view.key_scales(layer) is None:
            scatter_kv(k, v, view.keys(layer), view.values(layer), view.slot_mapping)
        else:
            view.update(layer, k, v)
        return q
