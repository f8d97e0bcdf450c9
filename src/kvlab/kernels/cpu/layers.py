"""The layers of a decoder in one call: between its kernels no Python runs."""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kvlab.kernels.cpu.interface import (
    TILE_SIDE,
    AttentionPart,
    LayerPart,
    LayersStep,
    MlpPart,
    Norm,
    PartKind,
    address,
    kv_format,
)
from kvlab.kernels.cpu.memory import empty
from kvlab.kernels.cpu.native import load, load_formats

#: What each kind of part consists of. `LayersStep.times` gets the time at which each of these begins, part by part,
#: and at which the last one ends.
TIMED = {
    PartKind.INPUT_NORM: ("norm",),
    PartKind.RESIDUAL_NORM: ("norm",),
    PartKind.OUTPUT_NORM: ("norm",),
    PartKind.ATTENTION: ("qkv", "rotate_and_store", "attention", "out"),
    PartKind.MLP: ("gate_up", "down"),
}


_Sum = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class NativePart(NamedTuple):
    """One operation of a layer, and the structure that describes it."""

    kind: PartKind
    structure: Norm | AttentionPart | MlpPart

    @property
    def scratch_width(self) -> int:
        """Elements per token that the part needs of the scratch memory."""
        match self.structure:
            case AttentionPart() as attention:
                return int(attention.qkv.outputs + attention.num_heads * attention.head_dim)
            case MlpPart() as mlp:
                return int(mlp.gate_up.outputs + mlp.down.inputs)
        return 0


class Layers:
    """Layers that can be run, in the order of parts that `in_order` checks, for rows of `hidden` elements. The
    tensors that the parts point to have to outlive them.
    """

    def __init__(self, parts: Sequence[NativePart], hidden: int) -> None:
        self._structures = [part.structure for part in parts]  # keeps them where the array points to
        self._parts = (LayerPart * len(parts))(
            *(LayerPart(part.kind, ctypes.addressof(part.structure)) for part in parts)
        )
        self._run = load().kvlab_layers
        self._hidden = hidden
        self._width = max(part.scratch_width for part in parts)  # the parts use the same scratch memory in turn
        self._memory = torch.empty(0)
        self._attend = any(part.kind is PartKind.ATTENTION for part in parts)
        self._sum: ctypes._FuncPointer | None = None  # what a part gives is whole
        self._sums = torch.empty(0)
        self._failure: BaseException | None = None
        #: Of each operation that is timed.
        self.timed = tuple(name for part in parts for name in TIMED[part.kind])

    def sum_with(self, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let what attention and MLP give be a part of a sum, which `add` makes of it in float32. What `add` raises
        `run` does.
        """

        def sum_to_delta(count: int) -> int:
            try:
                self._memory[:count].copy_(add(self._sums[:count]))
            except BaseException as failure:  # which C++ could not pass on
                self._failure = failure
                return 1
            return 0

        self._sum = _Sum(sum_to_delta)

    def run(
        self,
        x: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        sampled: torch.Tensor,
        places: torch.Tensor | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
        times: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step through all parts. Takes embeddings `x` `[T, hidden]`, dense, in bfloat16 or float32, which is
        the type of all other tensors; in float32 they are overwritten. Returns the rows `sampled` `[n]` int64 of
        the residual stream, in float32, and of x, which is yet to be added to it, `[n, hidden]` both. The next call
        overwrites x.

        `keys` and `values` are the cache of all layers, `[layers, blocks, kv_heads, block_size, head_dim]`;
        `positions` `[T]` int64; `slot_mapping` `[groups, T]` int64 and `block_tables` `[groups, B, width]` int32 of
        each group of layers, and `places` `[layers, 2]` int32 the group of each layer and which layer of the cache
        it has there; None: one group, with its layers in order. The rest as `paged_attention` takes it. `times`
        `[len(timed) + 1]` float64 gets the time at which each operation begins, and the last one ends.
        """
        residual, tokens = x.float(), len(x)
        rows = -(-tokens // TILE_SIDE) * TILE_SIDE  # whole tiles
        size, wide = rows * self._hidden, rows * self._width
        # Every step gets the same memory: the first write to a new page costs more than the write itself.
        if self._memory.numel() < 2 * size + wide:
            self._memory = empty((2 * size + wide,), x.dtype)
        if self._sum is not None and len(self._sums) < size:
            self._sums = empty((size,), torch.float32)
        delta, normed, scratch = self._memory[:size], self._memory[size:], self._memory[2 * size :]
        _, blocks, kv_heads, block_size, _ = keys.shape
        formats = kv_format(keys), kv_format(values)
        if any(formats):
            load_formats()
        # Behind the last attention, where that saves a tile of rows, the others are left out.
        few = self._attend and len(sampled) + TILE_SIDE <= tokens
        left = len(sampled) if few else tokens
        step = LayersStep(  # in the groups of interface.hpp
            keys=address(keys), values=address(values),
            key_scales=address(key_scales), value_scales=address(value_scales), rows=blocks * kv_heads * block_size,
            positions=address(positions), slot_mapping=address(slot_mapping),
            block_tables=address(block_tables), places=address(places),
            seq_lens=address(seq_lens), query_start=address(query_start), sampled=address(sampled),
            residual=address(residual), delta=address(delta), normed=address(normed), scratch=address(scratch),
            times=address(times), sums=address(self._sums),
            sum=None if self._sum is None else ctypes.cast(self._sum, ctypes.c_void_p),
            tokens=tokens, num_sampled=left, hidden=self._hidden, num_sequences=len(seq_lens),
            table_width=block_tables.shape[-1], block_size=block_size,
            key_format=formats[0], value_format=formats[1],
            element_bytes=x.element_size(), threads=torch.get_num_threads(),
        )  # fmt: skip
        self._run(ctypes.addressof(self._parts), len(self._parts), ctypes.addressof(step))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        x = delta[: left * self._hidden].view(left, self._hidden)
        return (residual[:left], x) if few or len(sampled) == tokens else (residual[sampled], x[sampled])


def in_order(parts: Sequence[NativePart]) -> bool:
    """Whether the parts come in the order that layers.cpp states."""
    kinds = [part.kind for part in parts]
    norms, computing = (PartKind.INPUT_NORM, PartKind.RESIDUAL_NORM), (PartKind.ATTENTION, PartKind.MLP)
    pairs_fit = all(
        (one in norms) == (other in computing) and (other is not PartKind.OUTPUT_NORM or one in computing)
        for one, other in pairwise(kinds)
    )
    return pairs_fit and kinds[0] in norms and kinds[-1] not in norms and PartKind.INPUT_NORM not in kinds[1:]
