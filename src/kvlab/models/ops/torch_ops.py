"""The decoder's arithmetic in PyTorch: readable, runs anywhere, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from kvlab.kv.view import CacheView
from kvlab.models.ops.base import Linear, Norm, Ops, TopK
from kvlab.models.rope import Angles, RotaryEmbedding, rotate

#: The gate's activation by the name that transformers gives it.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can pack this weight: bfloat16, on a CPU with instructions for it."""
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    suits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return onednn and suits and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class TorchLinear(Linear):
    """In bfloat16 on a CPU, oneDNN packs the weight once, which makes products of few rows twice as fast. Elsewhere
    this is an ordinary `torch.nn.functional.linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, lookup: bool) -> None:
        self._out_features = weight.shape[0]
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._table = weight if lookup else None
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        if not len(x):  # oneDNN refuses a batch of no rows
            return x.new_empty(0, self._out_features)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            raise RuntimeError("this weight was made without `lookup`")
        return functional.embedding(ids, self._table)


class TorchOps(Ops):
    """See Ops."""

    name = "torch"

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lookup: bool = False
    ) -> TorchLinear:
        return TorchLinear(weight, bias, lookup=lookup)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if x.dtype == norm.weight.dtype:
            return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
        return functional.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.eps).to(x.dtype)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return total, self.norm(total, norm)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        return rotary.tables.at(positions)

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        q, k, v = self._split(qkv, norms, view)
        view.update(layer, rotate(k, *angles), v)
        return rotate(q, *angles)

    def _split(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, view: CacheView
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values; the first two normed."""
        kv_heads = view.storage.spec.num_kv_heads
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        return (q, k, v) if norms is None else (self.norm(q, norms[0]), self.norm(k, norms[1]), v)

    def topk(self, x: torch.Tensor, count: int = 1) -> TopK:
        if count == 1:  # max is several times faster than argmax for bfloat16 on a CPU
            return TopK(*x.max(dim=-1, keepdim=True))
        if count == x.shape[1]:
            return TopK(*x.sort(dim=-1, descending=True, stable=True))
        # torch.topk does not define which of equal numbers it takes, nor their order.
        last = x.topk(count).values[:, -1:]
        rows, indices = (~(x < last)).nonzero(as_tuple=True)  # NaN is not less
        values = x[rows, indices]
        order = values.argsort(descending=True, stable=True)  # NaN first
        order = order[rows[order].argsort(stable=True)]
        candidates = rows.bincount(minlength=len(x))
        starts = candidates.cumsum(0) - candidates
        chosen = order[starts[:, None] + torch.arange(count, device=x.device)]
        return TopK(values[chosen], indices[chosen])
