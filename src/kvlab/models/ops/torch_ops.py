"""The decoder's arithmetic in PyTorch: readable, runs anywhere, and what the kernels are tested against."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from kvlab.kv.view import CacheView
from kvlab.models.ops.base import PART_BYTES, Linear, Norm, Ops, TopK
from kvlab.models.rope import Angles, RotaryEmbedding, rotate

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def packs_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 on this machine's CPU: by oneDNN, which packs the weight first. Without
    instructions for bfloat16 it does not.
    """
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchLinear(Linear):
    """In bfloat16 on a CPU, oneDNN packs the weight once, which makes products of few rows twice as fast. A CPU
    without instructions for bfloat16 multiplies in float32, part by part of the weight, and rounds once: PyTorch's
    own product would be tens of times slower. Elsewhere this is an ordinary `torch.nn.functional.linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, lookup: bool) -> None:
        self._out_features = weight.shape[0]
        halves = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._packed = halves and packs_bfloat16()
        self._widened = halves and not self._packed
        self._weight = _pack(weight) if self._packed else weight
        self._table = weight if lookup else None
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._widened:
            return _linear_in_float32(x, self._weight, self._bias, x.dtype)
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        if not len(x):  # oneDNN refuses a batch of no rows
            return x.new_empty(0, self._out_features)
        return _packed_linear(x, self._weight, self._bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self._widened:
            return _linear_in_float32(x, self._weight, self._bias, torch.float32)
        return self(x).float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            raise RuntimeError("this weight was made without `lookup`")
        return functional.embedding(ids, self._table)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _linear_in_float32(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The product in float32, rounded once to `dtype`. A part of the weight and its products take `PART_BYTES` at
    most: in the processor's cache it costs little to widen it anew each time.
    """
    outputs, inputs = weight.shape
    y, wide = x.new_empty(len(x), outputs, dtype=dtype), x.float()
    step = max(1, PART_BYTES // (wide.itemsize * (inputs + len(x))))
    part = torch.empty(min(step, outputs), inputs)
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        widened = part[: end - start].copy_(weight[start:end])
        y[:, start:end] = functional.linear(wide, widened, None if bias is None else bias[start:end].float())
    return y


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
        return total, functional.rms_norm(total, (x.shape[-1],), norm.weight.float(), norm.eps).to(x.dtype)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up

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
