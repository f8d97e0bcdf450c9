"""The decoder's arithmetic in native kernels on the CPU."""

from collections.abc import Sequence

import torch

from kvlab.attention.backends.cpu import CpuAttention
from kvlab.attention.base import AttentionBackend
from kvlab.config.executor import W8A8
from kvlab.errors import KernelError
from kvlab.kernels.cpu import elementwise
from kvlab.kernels.cpu.elementwise import topk
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.native import instruction_set, int8_path, load, paths
from kvlab.kv.spec import PageLayout
from kvlab.kv.view import CacheView
from kvlab.models.ops.base import LayerPart, Linear, Norm, Ops, TopK
from kvlab.models.ops.cpu_layers import NativeLinear, NativeStack
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import Angles, RotaryEmbedding


class CpuOps(Ops):
    """See Ops. For float32 and bfloat16. The matrices of a bfloat16 model are stored as `weights` says: `plain`,
    `compact`, `int8` or `int8_w8a8`; `auto` is `compact` where products are computed in matrix tiles, since memory
    then limits a step of few rows. Those of a float32 model stay as they are.

    Raises KernelError where the kernels cannot be compiled.
    """

    def __init__(self, *, weights: str = "auto", dtype: torch.dtype = torch.bfloat16) -> None:
        chosen = paths()
        compact = bool(load().kvlab_packed_linear_bytes(1, 32, WeightFormat.COMPACT, 2))
        if weights == "auto":
            weights = "compact" if chosen.tiles and compact and dtype == torch.bfloat16 else "plain"
        elif weights == "compact" and not compact:
            raise KernelError("weights in 12 bits need a processor with AVX-512")
        self.weights = weights
        self.name = f"native ({instruction_set()})"
        if weights == W8A8:
            self.name = f"native ({instruction_set()}; products in int8 by {int8_path()})"
        elif chosen.rates and dtype == torch.bfloat16:
            self.name = f"native ({instruction_set()}; products in {chosen.name})"
            self.reason = chosen.reason

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lookup: bool = False) -> Linear:
        return NativeLinear(weight, bias, WeightFormat[self.weights.upper()])

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return elementwise.rms_norm(x, norm.weight, norm.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, elementwise.rms_norm(x, norm.weight, norm.eps, residual)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return elementwise.gated(gate_up, gelu=activation == "gelu_pytorch_tanh")

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        return rotary.tables

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        if view.storage.layout is not PageLayout.HND:  # the kernel supports HND alone
            return TorchOps().rotate_and_store(qkv, norms, angles.at(view.positions), view, layer)
        q_norm, k_norm = norms or (None, None)
        return elementwise.rotate_and_store(
            qkv,
            view.keys(layer),
            view.values(layer),
            *angles,
            view.positions,
            view.slot_mapping,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            key_scales=view.key_scales(layer),
            value_scales=view.value_scales(layer),
        )

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> NativeStack | None:
        return NativeStack.build(layers) if isinstance(attention, CpuAttention) else None

    def linear_top1(self, linear: Linear, x: torch.Tensor) -> TopK:
        top1 = linear.top1(x, linear.bias) if isinstance(linear, NativeLinear) else None
        return super().linear_top1(linear, x) if top1 is None else TopK(*top1)

    def topk(self, x: torch.Tensor, count: int = 1) -> TopK:
        return TopK(*topk(x, count))
