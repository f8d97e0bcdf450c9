"""All layers of a decoder in one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from kvlab.kernels.cpu import interface
from kvlab.kernels.cpu.interface import MAX_HEAD_DIM, PartKind, WeightFormat
from kvlab.kernels.cpu.layers import Layers, NativePart, in_order
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kv.view import CacheView
from kvlab.models.layers import AttentionPart, InputNorm, MlpPart, OutputNorm, ResidualNorm
from kvlab.models.ops.base import LayerPart, Linear, Norm, ResidualAndX, Stack


class NativeLinear(PackedWeight, Linear):
    """A product with a packed weight. One copy serves any number of rows, and look-ups."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, format: WeightFormat) -> None:
        super().__init__(weight, format)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.bias, in_float32=True)


class NativeStack(Stack):
    """See Stack. Made by `build`.

    `on_times`, where it is set, is called after each run with the names of the operations that were timed, and the
    time at which each of them began and the last one ended, in seconds of a clock of its own.
    """

    def __init__(self, layers: Sequence[Sequence[LayerPart]], native: Layers) -> None:
        self._parts = layers  # keeps the tensors that the native parts point to
        self._layers = native
        self.on_times: Callable[[Sequence[str], list[float]], None] | None = None

    @classmethod
    def build(cls, layers: Sequence[Sequence[LayerPart]]) -> NativeStack | None:
        """A stack of these layers. None where a part is of an unknown type, has weights that are not packed,
        or heads that no kernel supports, or where the parts come in an order that layers.cpp does not
        support.
        """
        native = [_native(part) for part in chain.from_iterable(layers)]
        known = [part for part in native if part is not None]
        first = layers[0][0] if layers and layers[0] else None
        if len(known) < len(native) or not isinstance(first, InputNorm) or not in_order(known):
            return None
        return cls(layers, Layers(known, first.norm.weight.numel()))

    def sum_with(self, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._layers.sum_with(add)

    def __call__(self, x: torch.Tensor, view: CacheView, rows: torch.Tensor) -> ResidualAndX:
        x, storage, timed = x.contiguous(), view.storage, self._layers.timed
        times = None if self.on_times is None else torch.empty(len(timed) + 1, dtype=torch.float64)
        residual_and_x = self._layers.run(
            x,
            storage.keys,
            storage.values,
            positions=view.positions,
            slot_mapping=_stacked([group.slot_mapping for group in view.groups]),
            block_tables=_stacked([group.block_tables for group in view.groups]),
            places=storage.places if len(view.groups) > 1 else None,
            seq_lens=view.seq_lens,
            query_start=view.query_start,
            sampled=rows,
            key_scales=storage.key_scales,
            value_scales=storage.value_scales,
            times=times,
        )
        if self.on_times is not None and times is not None:
            self.on_times(timed, times.tolist())
        return residual_and_x


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One behind the other; one alone is not copied."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def _native(part: LayerPart) -> NativePart | None:
    """The native form of a part, or None where the native layers cannot compute it."""
    match part:
        case InputNorm(norm=norm):
            return NativePart(PartKind.INPUT_NORM, _norm(norm))
        case ResidualNorm(norm=norm):
            return NativePart(PartKind.RESIDUAL_NORM, _norm(norm))
        case OutputNorm(norm=norm):
            return NativePart(PartKind.OUTPUT_NORM, _norm(norm))
        case AttentionPart(qkv=NativeLinear() as qkv, out=NativeLinear() as out, spec=spec):
            if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 2:
                return None
            query_norm, key_norm = part.norms or (None, None)
            attention = interface.AttentionPart(
                qkv=qkv.native(qkv.bias),
                out=out.native(out.bias),
                query_norm=_norm(query_norm),
                key_norm=_norm(key_norm),
                cosine=part.rotary.tables.cosine.data_ptr(),
                sine=part.rotary.tables.sine.data_ptr(),
                layer=part.layer,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.sliding_window or 0,
                scale=spec.scale,
                soft_cap=spec.soft_cap or 0.0,
            )
            return NativePart(PartKind.ATTENTION, attention)
        case MlpPart(gate_up=NativeLinear() as gate_up, down=NativeLinear() as down):
            matrices = gate_up.native(gate_up.bias), down.native(down.bias)
            return NativePart(PartKind.MLP, interface.MlpPart(*matrices, part.activation == "gelu_pytorch_tanh"))
    return None


def _norm(norm: Norm | None) -> interface.Norm:
    if norm is None:
        return interface.Norm(None, 0.0, 2)
    return interface.Norm(norm.weight.data_ptr(), norm.eps, norm.weight.element_size())
