"""Matrix products with weights in bfloat16 on the CPU, native."""

from __future__ import annotations

import torch

from kvlab.kernels.cpu import memory
from kvlab.kernels.cpu.interface import LinearWeight
from kvlab.kernels.cpu.native import load


class PackedWeight:
    """A weight `[outputs, inputs]` in the order in which products read it, padded to whole vectors of outputs.

    With `int8` each output's weights are rounded to int8 with a scale, their largest magnitude / 127: half the
    bytes to read. Products still take and give bfloat16, and are summed in float32. Raises KernelError where the
    kernels cannot be compiled.
    """

    def __init__(self, weight: torch.Tensor, *, int8: bool = False) -> None:
        library = self._library = load()
        self.outputs, self.inputs = weight.shape
        shape = (self.outputs, self.inputs)
        self._packed = memory.empty((library.kvlab_packed_linear_bytes(*shape, int8),), torch.uint8)
        self._scales = torch.empty(self.outputs) if int8 else None
        weight, threads = weight.contiguous(), torch.get_num_threads()
        source, target = weight.data_ptr(), self._packed.data_ptr()
        if int8:
            library.kvlab_pack_linear_int8(source, *shape, target, self._at_scales, threads)
        else:
            library.kvlab_pack_linear(source, *shape, target, threads)

    @property
    def _at_scales(self) -> int | None:
        return None if self._scales is None else self._scales.data_ptr()

    def native(self, bias: torch.Tensor | None = None) -> LinearWeight:
        """The same for native code, which may use it as long as this weight and the bias exist."""
        at_bias = None if bias is None else bias.data_ptr()
        return LinearWeight(self._packed.data_ptr(), self._at_scales, at_bias, self.outputs, self.inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, padding and scales included."""
        return self._packed.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `[rows, inputs]` W^T + bias `[outputs]`: `[rows, outputs]`, summed in float32, rounded once."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=x.dtype)
        self._library.kvlab_linear(*self._sides(x, bias), out.data_ptr(), torch.get_num_threads())
        return out

    def top1(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest number of each row of `multiply` and its index, `[rows, 1]`, as `topk` finds them, without
        storing the others. None where the kernel cannot do that and the product has to be stored first.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        values = torch.empty(len(x), 1, dtype=x.dtype)
        indices = torch.empty(len(x), 1, dtype=torch.int64)
        outputs = values.data_ptr(), indices.data_ptr()
        done = len(x) and self._library.kvlab_linear_top1(*self._sides(x, bias), *outputs, torch.get_num_threads())
        return (values, indices) if done else None

    def _sides(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[int | None, ...]:
        """The first arguments of native products."""
        at_bias = None if bias is None else bias.data_ptr()
        weight = self._packed.data_ptr(), self._at_scales, at_bias, self.outputs, self.inputs
        return x.data_ptr(), x.stride(0), len(x), *weight

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` `[n]` of the weight, as it was or as int8 has it: `[n, inputs]` bfloat16. A tied embedding
        is looked up here.
        """
        out = torch.empty(len(ids), self.inputs, dtype=torch.bfloat16)
        self._library.kvlab_packed_rows(
            self._packed.data_ptr(),
            self._at_scales,
            self.inputs,
            ids.data_ptr(),
            len(ids),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
