"""The layers a decoder is made of."""

from __future__ import annotations

import torch
from torch.nn import functional


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight: bfloat16 on a CPU that computes in it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """y = x W^T for a weight `[out_features, in_features]`.

    In bfloat16 on a CPU the weight is kept in oneDNN's own layout only, packed once; a product with few rows
    then reads it twice as fast. Elsewhere it is an ordinary `torch.nn.functional.linear`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features = weight.shape[0]
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features]` to `[T, out_features]`."""
        if self._packed and len(x):
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return y
        if not len(x):  # oneDNN does not take a batch of no rows
            return x.new_empty(0, self.out_features)
        return functional.linear(x, self._weight)


class RMSNorm:
    """x / rms(x) * w over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as `x`."""
        return functional.rms_norm(x, (x.shape[-1],), self._weight, self._eps)
