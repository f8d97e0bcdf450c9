"""What a decoder computes apart from attention: a contract, one file per way, and the choice among them."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvlab.errors import KernelError
from kvlab.models.ops.base import Ops
from kvlab.models.ops.torch_ops import TorchOps


def select_ops(dtype: torch.dtype, device: torch.device | str, *, kernels: bool = True) -> Ops:
    """kvlab's own kernels where there are some for the device and the dtype and they are wanted, else PyTorch's."""
    kind = torch.device(device).type
    if kernels and kind == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from kvlab.models.ops.cpu_ops import CpuOps

        try:
            return CpuOps()
        except KernelError:  # it has been logged
            return TorchOps()
    if kernels and kind == "cuda" and find_spec("triton") is not None:
        from kvlab.models.ops.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()
