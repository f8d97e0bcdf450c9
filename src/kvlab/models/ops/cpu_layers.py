"""All layers of a decoder in one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvlab.kernels.cpu.elementwise import MAX_HEAD_DIM
from kvlab.kernels.cpu.layers import TILE_ROWS, TIMED, Layer, Layers, Product, Step
from kvlab.kernels.cpu.layers import Norm as NativeNorm
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.memory import empty
from kvlab.kv.view import CacheView
from kvlab.models.ops.base import LayerParts, Linear, Norm, TopK


class NativeLinear:
    """One packed copy of the weight serves any number of rows, and lookups."""

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
        """See Ops.linear_top1; None where the product has to be written first."""
        found = self._weight.top1(x, self._bias)
        return None if found is None else TopK(*found)

    def product(self) -> Product:
        """See PackedWeight."""
        return self._weight.product(self._bias)


class NativeStack:
    """See Stack. For layers that `can_stack`.

    With `on_times` it tells, after each run, when each part of each layer began and the last one ended, in seconds
    of a clock of its own; the parts are those of TIMED.
    """

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        self._parts = tuple(layers)  # keeps what the native layers point to
        native = [_native(layer) for layer in layers]
        self._layers = Layers(native)
        self._hidden = layers[0].attention_norm.weight.numel()
        # Of attention and of the feed-forward, which use the same memory, whichever is wider.
        self._width = max(
            *(layer.qkv.outputs + 2 * layer.num_heads * layer.head_dim for layer in native),
            *(layer.gate_up.outputs + layer.down.inputs for layer in native),
        )
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self.on_times: Callable[[list[float]], None] | None = None

    def __call__(self, residual: torch.Tensor, view: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
        """See Stack."""
        tokens, storage = len(residual), view.storage
        residual = residual.contiguous()
        delta, normed, scratch = self._room(tokens)
        times = None
        if self.on_times is not None:
            times = torch.empty(len(self._parts) * len(TIMED) + 1, dtype=torch.float64)
        _, blocks, kv_heads, block_size, _ = storage.keys.shape
        self._layers.run(
            Step(
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
            self.on_times(times.tolist())
        return residual, delta

    def _room(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`delta` `[tokens, hidden]`, `normed` and scratch with room for whole tiles of tokens: the same memory in
        every step, as new pages cost more than what is written to them.
        """
        rows = -(-tokens // TILE_ROWS) * TILE_ROWS
        size, wide = rows * self._hidden, rows * self._width
        if self._memory.numel() < 2 * size + wide:
            self._memory = empty((2 * size + wide,), torch.bfloat16)
        delta, normed = self._memory[: 2 * size].view(2, rows, -1)
        return delta[:tokens], normed, self._memory[2 * size :]


def can_stack(layers: Sequence[LayerParts]) -> bool:
    """Whether the layers are all in bfloat16 with packed weights, and their heads of a size that kernels take."""
    return bool(layers) and all(
        layer.attention.head_dim <= MAX_HEAD_DIM
        and layer.attention.head_dim % 2 == 0
        and all(isinstance(x, NativeLinear) for x in (layer.qkv, layer.out, layer.gate_up, layer.down))
        for layer in layers
    )


def _native(layer: LayerParts) -> Layer:
    spec = layer.attention
    query_norm, key_norm = layer.qk_norms or (None, None)
    return Layer(
        attention_norm=_norm(layer.attention_norm),
        query_norm=_norm(query_norm),
        key_norm=_norm(key_norm),
        post_attention_norm=_norm(layer.post_attention_norm),
        mlp_norm=_norm(layer.mlp_norm),
        post_mlp_norm=_norm(layer.post_mlp_norm),
        qkv=_product(layer.qkv),
        out=_product(layer.out),
        gate_up=_product(layer.gate_up),
        down=_product(layer.down),
        cosine=layer.angles.cos.data_ptr(),
        sine=layer.angles.sin.data_ptr(),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window or 0,
        gelu=layer.activation == "gelu_pytorch_tanh",
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )


def _product(linear: Linear) -> Product:
    if not isinstance(linear, NativeLinear):
        raise TypeError("this weight is not packed")
    return linear.product()


def _norm(norm: Norm | None) -> NativeNorm:
    if norm is None:
        return NativeNorm(None, 0.0, 2)
    return NativeNorm(norm.weight.data_ptr(), norm.eps, norm.weight.element_size())


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
