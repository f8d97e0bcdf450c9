"""Ops: what a decoder computes apart from attention. A contract, one file per implementation, and the selection."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvlab.errors import ConfigError, KernelError
from kvlab.models.ops.base import Ops
from kvlab.models.ops.torch_ops import TorchOps


def select_ops(
    dtype: torch.dtype, device: torch.device | str, *, kernels: bool = True, int8_weights: bool = False
) -> Ops:
    """kvlab's kernels where `kernels` allows them and they support device and dtype, else PyTorch.

    Raises ConfigError for `int8_weights` where no kernel supports them.
    """
    kind = torch.device(device).type
    if int8_weights:
        return _int8_ops(dtype, kind, kernels=kernels)
    if kernels and kind == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from kvlab.models.ops.cpu_ops import CpuOps

        try:
            return CpuOps()
        except KernelError:  # `load` has logged it
            return TorchOps()
    if kernels and kind == "cuda" and find_spec("triton") is not None:
        from kvlab.models.ops.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()


def _int8_ops(dtype: torch.dtype, kind: str, *, kernels: bool) -> Ops:
    reason = ""
    if kind != "cpu":
        reason = f"runs on a CPU, not on {kind}; use executor.device=cpu"
    elif dtype != torch.bfloat16:
        reason = f"is for executor.dtype=bfloat16, not {str(dtype).removeprefix('torch.')}"
    elif not kernels:
        reason = "is computed by a kernel, and executor.kernels=false allows none"
    else:
        from kvlab.models.ops.cpu_ops import CpuOps

        try:
            return CpuOps(int8_weights=True)
        except KernelError as error:
            reason = f"needs the native kernels: {error}"
    raise ConfigError("executor.weights", "int8", f"{reason}; or use executor.weights=auto")
