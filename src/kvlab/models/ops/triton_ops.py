"""The decoder's arithmetic on a GPU: Triton where a fused kernel saves launches, PyTorch for the rest."""

import torch

from kvlab.kernels.triton.rms_norm import rms_norm
from kvlab.kernels.triton.rotary import rotate_in_place
from kvlab.kernels.triton.scatter import scatter_kv
from kvlab.kv.view import CacheView
from kvlab.models.ops.base import Norm
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import Angles, RotaryEmbedding


class TritonOps(TorchOps):
    """See Ops."""

    name = "triton"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, rms_norm(x, norm.weight, norm.eps, residual=residual)

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        return rotary.tables

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        q, k, v = self._split(qkv, norms, view)
        rotate_in_place(q, k, *angles, view.positions)
        if view.storage.is_plain:
            scatter_kv(k, v, view.keys(layer), view.values(layer), view.slot_mapping)
        else:
            view.update(layer, k, v)
        return q
