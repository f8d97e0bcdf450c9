"""Matrix products in bfloat16 or float32 on the CPU, native."""

import ctypes

import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu import memory
from kvlab.kernels.cpu.interface import LinearWeight, WeightFormat, address
from kvlab.kernels.cpu.native import load

_MOST_INPUTS = (2**31 - 1) // (255 * 127)  # of INT8_W8A8, whose weights are stored unsigned


class PackedWeight:
    """A weight `[outputs, inputs]`, bfloat16 or float32, in the order in which products read it, padded to whole
    vectors of outputs. Products take and give its type, and are summed in float32. A weight in float32 is PLAIN.

    INT8 rounds each output's weights to int8 with a scale, their largest magnitude / 127: half the bytes to read.
    INT8_W8A8 does so, and `multiply` rounds each row of x likewise; sums are exact in 32 bits (`w8a8`). A row with
    a number that is not finite becomes NaN.
    COMPACT is exact: exponents, which vary little, are stored in four bits instead of eight. `format` is PLAIN
    where they vary too much for that, where the inputs are no multiple of 32, or the processor has no AVX-512.
    Raises KernelError where the kernels cannot be compiled, and for more inputs than INT8_W8A8 can sum.
    """

    def __init__(self, weight: torch.Tensor, format: WeightFormat = WeightFormat.PLAIN) -> None:
        library = self._library = load()
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        shape = (self.outputs, self.inputs)
        weight, threads = weight.contiguous(), torch.get_num_threads()
        if self.dtype == torch.float32:
            format = WeightFormat.PLAIN
        if format is WeightFormat.INT8_W8A8 and self.inputs > _MOST_INPUTS:
            text = f"32 bits hold the sums of no more than {_MOST_INPUTS:,}; use executor.weights=int8"
            raise KernelError(f"a weight in int8_w8a8 with {self.inputs:,} inputs: {text}")
        if format is WeightFormat.COMPACT:
            self._packed = self._empty(format)
            into = weight.data_ptr(), *shape, self._packed.data_ptr(), threads
            if not (self._packed.nbytes and library.kvlab_pack_linear_compact(*into)):
                format = WeightFormat.PLAIN
        self.format = format
        in_int8 = format in (WeightFormat.INT8, WeightFormat.INT8_W8A8)
        self._scales = torch.empty(self.outputs) if in_int8 else None
        if format is WeightFormat.COMPACT:
            return
        self._packed = self._empty(format)
        source, target = weight.data_ptr(), self._packed.data_ptr()
        if self._scales is not None:
            library.kvlab_pack_linear_int8(source, *shape, format, target, self._scales.data_ptr(), threads)
        else:
            library.kvlab_pack_linear(source, *shape, target, self.dtype.itemsize, threads)

    def _empty(self, format: WeightFormat) -> torch.Tensor:
        shape = self.outputs, self.inputs
        num_bytes = self._library.kvlab_packed_linear_bytes(*shape, format, self.dtype.itemsize)
        return memory.empty((num_bytes,), torch.uint8)

    def native(self, bias: torch.Tensor | None = None) -> LinearWeight:
        """The same for native code, which may use it as long as this weight and the bias exist."""
        addresses, shape = map(address, (self._packed, self._scales, bias)), (self.outputs, self.inputs)
        return LinearWeight(*addresses, *shape, self.format, self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, padding and scales included."""
        return self._packed.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, in_float32: bool = False
    ) -> torch.Tensor:
        """`x` `[rows, inputs]` W^T + bias `[outputs]`: `[rows, outputs]`, summed in float32 and rounded once to the
        type of x, or with `in_float32` not at all.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=torch.float32 if in_float32 else x.dtype)
        weight = self.native(bias)
        sides = x.data_ptr(), x.stride(0), len(x), ctypes.addressof(weight)
        self._library.kvlab_linear(*sides, out.data_ptr(), in_float32, torch.get_num_threads())
        return out

    def top1(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest number of each row of `multiply` in float32 and its index, `[rows, 1]`, as `topk` finds them,
        without storing the others. None where the kernel cannot do that and the product has to be stored first.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        values = torch.empty(len(x), 1)
        indices = torch.empty(len(x), 1, dtype=torch.int64)
        weight = self.native(bias)
        sides = x.data_ptr(), x.stride(0), len(x), ctypes.addressof(weight)
        outputs = values.data_ptr(), indices.data_ptr()
        done = len(x) and self._library.kvlab_linear_top1(*sides, *outputs, torch.get_num_threads())
        return (values, indices) if done else None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` `[n]` of the weight, as it was or as int8 has it: `[n, inputs]`. A tied embedding is
        looked up here.
        """
        out = torch.empty(len(ids), self.inputs, dtype=self.dtype)
        weight = self.native()
        of = ctypes.addressof(weight), ids.data_ptr(), len(ids)
        self._library.kvlab_packed_rows(*of, out.data_ptr(), torch.get_num_threads())
        return out
