"""Matrix products with weights in bfloat16 on the CPU, native."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from kvlab.kernels.cpu.library import load


class PackedWeight:
    """A weight `[outputs, inputs]` in the order in which products read it, padded to whole vectors of outputs.

    Raises KernelError where the kernels cannot be compiled.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        library = load()
        self.outputs, self.inputs = weight.shape
        shape = (c_int(self.outputs), c_int(self.inputs))
        library.kvlab_packed_linear_bytes.restype = c_int64
        self._packed = torch.empty(library.kvlab_packed_linear_bytes(*shape), dtype=torch.uint8)
        library.kvlab_pack_linear(
            c_void_p(weight.contiguous().data_ptr()),
            *shape,
            c_void_p(self._packed.data_ptr()),
            c_int(torch.get_num_threads()),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, padding included."""
        return self._packed.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `[rows, inputs]` W^T + bias `[outputs]`: `[rows, outputs]`, summed in float32, rounded once."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=x.dtype)
        load().kvlab_linear(
            c_void_p(x.data_ptr()),
            c_int64(x.stride(0)),
            c_int(len(x)),
            c_void_p(self._packed.data_ptr()),
            c_void_p(None if bias is None else bias.data_ptr()),
            c_int(self.outputs),
            c_int(self.inputs),
            c_void_p(out.data_ptr()),
            c_int(torch.get_num_threads()),
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` `[n]` of the weight as it was: `[n, inputs]`. A tied embedding is looked up here."""
        out = torch.empty(len(ids), self.inputs, dtype=torch.bfloat16)
        load().kvlab_packed_rows(
            c_void_p(self._packed.data_ptr()),
            c_int(self.inputs),
            c_void_p(ids.data_ptr()),
            c_int(len(ids)),
            c_void_p(out.data_ptr()),
            c_int(torch.get_num_threads()),
        )
        return out
