"""All layers of a decoder in one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import torch

from kvlab.kernels.cpu import interface
from kvlab.kernels.cpu.interface import MAX_HEAD_DIM, TILE_SIDE, LayersStep, LinearWeight, PartKind
from kvlab.kernels.cpu.layers import Layers, NativePart
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.memory import empty
from kvlab.kv.view import CacheView
from kvlab.models.layers import AttentionPart, InputNorm, MlpPart, OutputNorm, ResidualNorm
from kvlab.models.ops.base import LayerPart, Norm, TopK


class NativeLinear:
    """A product with a packed weight. One copy serves any number of rows, and look-ups."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, int8: bool) -> None:
        self._weight = PackedWeight(weight, int8=int8)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._weight.multiply(x, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._weight.rows(ids)

    def top1(self, x: torch.Tensor) -> TopK | None:
        """See Ops.linear_top1; None where the product has to be stored first."""
        found = self._weight.top1(x, self._bias)
        return None if found is None else TopK(*found)

    def native(self) -> LinearWeight:
        """See PackedWeight.native."""
        return self._weight.native(self._bias)


class NativeStack:
    """See Stack. Made by `build`.

    `on_times`, where it is set, is called after each run with the names of the operations that were timed, and the
    time at which each of them began and the last one ended, in seconds of a clock of its own.
    """

    def __init__(self, layers: Sequence[Sequence[LayerPart]], native: Sequence[NativePart], hidden: int) -> None:
        self._parts = layers  # keeps the tensors that the native parts point to
        self._layers = Layers(native)
        self._hidden = hidden
        self._width = max(_scratch_width(part) for part in native)  # the parts use the same scratch memory in turn
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self.on_times: Callable[[Sequence[str], list[float]], None] | None = None

    @classmethod
    def build(cls, layers: Sequence[Sequence[LayerPart]]) -> NativeStack | None:
        """A stack of these layers. None where a part is of an unknown type, has weights that are not packed
        bfloat16 or heads that no kernel supports, or where the parts come in an order that layers.cpp does not
        support.
        """
        native = [_native(part) for part in chain.from_iterable(layers)]
        known = [part for part in native if part is not None]
        first = layers[0][0] if layers and layers[0] else None
        if len(known) < len(native) or not isinstance(first, InputNorm) or not _in_order([p.kind for p in known]):
            return None
        return cls(layers, known, first.norm.weight.numel())

    def __call__(self, residual: torch.Tensor, view: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
        """See Stack."""
        tokens, storage = len(residual), view.storage
        residual = residual.contiguous()
        delta, normed, scratch = self._room(tokens)
        times = None
        if self.on_times is not None:
            times = torch.empty(len(self._layers.timed) + 1, dtype=torch.float64)
        _, blocks, kv_heads, block_size, _ = storage.keys.shape
        self._layers.run(
            LayersStep(
                keys=storage.keys.data_ptr(),
                values=storage.values.data_ptr(),
                key_scales=_at(storage.key_scales),
                value_scales=_at(storage.value_scales),
                rows=blocks * kv_heads * block_size,
                positions=view.positions.data_ptr(),
                slot_mapping=view.slot_mapping.data_ptr(),
                block_tables=view.block_tables.data_ptr(),
                seq_lens=view.seq_lens.data_ptr(),
                query_start=view.query_start.data_ptr(),
                residual=residual.data_ptr(),
                delta=delta.data_ptr(),
                normed=normed.data_ptr(),
                scratch=scratch.data_ptr(),
                times=_at(times),
                tokens=tokens,
                hidden=self._hidden,
                num_sequences=view.num_sequences,
                table_width=view.block_tables.shape[1],
                block_size=block_size,
                threads=torch.get_num_threads(),
            )
        )
        if self.on_times is not None and times is not None:
            self.on_times(self._layers.timed, times.tolist())
        return residual, delta

    def _room(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`delta` `[tokens, hidden]`, and `normed` and scratch with room for whole tiles of tokens. Every step gets
        the same memory: the first write to a new page costs more than the write itself.
        """
        rows = -(-tokens // TILE_SIDE) * TILE_SIDE
        size, wide = rows * self._hidden, rows * self._width
        if self._memory.numel() < 2 * size + wide:
            self._memory = empty((2 * size + wide,), torch.bfloat16)
        delta, normed = self._memory[: 2 * size].view(2, rows, -1)
        return delta[:tokens], normed, self._memory[2 * size :]


def _in_order(kinds: Sequence[PartKind]) -> bool:
    """Whether the parts come in the order that layers.cpp states."""
    norms, computing = (PartKind.INPUT_NORM, PartKind.RESIDUAL_NORM), (PartKind.ATTENTION, PartKind.MLP)
    pairs_fit = all(
        (one in norms) == (other in computing) and (other is not PartKind.OUTPUT_NORM or one in computing)
        for one, other in pairwise(kinds)
    )
    return pairs_fit and kinds[0] in norms and kinds[-1] not in norms and PartKind.INPUT_NORM not in kinds[1:]


def _native(part: LayerPart) -> NativePart | None:
    """The native form of a part, or None where the native layers cannot compute it."""
    match part:
        case InputNorm(norm=norm):
            return NativePart(PartKind.INPUT_NORM, _norm(norm))
        case ResidualNorm(norm=norm):
            return NativePart(PartKind.RESIDUAL_NORM, _norm(norm))
        case OutputNorm(norm=norm):
            return NativePart(PartKind.OUTPUT_NORM, _norm(norm))
        case AttentionPart():
            return _attention(part)
        case MlpPart(gate_up=NativeLinear() as gate_up, down=NativeLinear() as down):
            gelu = part.activation == "gelu_pytorch_tanh"
            return NativePart(PartKind.MLP, interface.MlpPart(gate_up.native(), down.native(), gelu))
    return None


def _attention(part: AttentionPart) -> NativePart | None:
    spec, qkv, out = part.spec, part.qkv, part.out
    if not isinstance(qkv, NativeLinear) or not isinstance(out, NativeLinear):
        return None
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 2:
        return None
    query_norm, key_norm = part.norms or (None, None)
    native = interface.AttentionPart(
        qkv=qkv.native(),
        out=out.native(),
        query_norm=_norm(query_norm),
        key_norm=_norm(key_norm),
        cosine=part.rotary.cos.data_ptr(),
        sine=part.rotary.sin.data_ptr(),
        layer=part.layer,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )
    return NativePart(PartKind.ATTENTION, native)


def _norm(norm: Norm | None) -> interface.Norm:
    if norm is None:
        return interface.Norm(None, 0.0, 2)
    return interface.Norm(norm.weight.data_ptr(), norm.eps, norm.weight.element_size())


def _scratch_width(part: NativePart) -> int:
    """Elements per token that a part needs of the scratch memory."""
    match part.structure:
        case interface.AttentionPart() as attention:
            return int(attention.qkv.outputs + 2 * attention.num_heads * attention.head_dim)
        case interface.MlpPart() as mlp:
            return int(mlp.gate_up.outputs + mlp.down.inputs)
    return 0


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
