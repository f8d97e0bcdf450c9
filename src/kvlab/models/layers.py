"""The layers a decoder is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

#: The gate's activation by the name that transformers gives it.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight: bfloat16 on a CPU that computes in it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """y = x W^T + b for a weight `[out_features, in_features]` and, if there is one, a bias `[out_features]`.

    In bfloat16 on a CPU the weight is kept in oneDNN's own layout only, packed once; a product with few rows
    then reads it twice as fast. Elsewhere it is an ordinary `torch.nn.functional.linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features]` to `[T, out_features]`."""
        if self._packed and len(x):
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        if not len(x):  # oneDNN does not take a batch of no rows
            return x.new_empty(0, self.out_features)
        return functional.linear(x, self._weight, self._bias)


class RMSNorm:
    """x / rms(x) * w over the last dimension, computed in float32 (Zhang and Sennrich, 2019).

    With `offset` the factor is 1 + w. It is then kept in float32: next to 1, half precision would lose most of
    the digits of a small w.
    """

    def __init__(self, weight: torch.Tensor, eps: float, *, offset: bool = False) -> None:
        self._weight = 1.0 + weight.float() if offset else weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as `x`."""
        if x.dtype == self._weight.dtype:
            return functional.rms_norm(x, (x.shape[-1],), self._weight, self._eps)
        return functional.rms_norm(x.float(), (x.shape[-1],), self._weight, self._eps).to(x.dtype)
