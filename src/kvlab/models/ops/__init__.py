"""Ops: what a decoder computes apart from attention. A contract, one file per implementation, and the selection."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvlab.config.executor import PACKED_WEIGHTS
from kvlab.errors import ConfigError, KernelError
from kvlab.models.ops.base import Ops

if TYPE_CHECKING:
    import torch


def select_ops(
    dtype: torch.dtype, device: torch.device | str, *, kernels: bool = True, weights: str = "auto"
) -> Ops:
    """kvlab's kernels where `kernels` allows them and they support device and dtype, else PyTorch.

    Raises ConfigError for `weights` in a format of the kernels where no kernel supports them.
    """
    import torch

    from kvlab.models.ops.cpu_ops import CpuOps
    from kvlab.models.ops.torch_ops import TorchOps

    kind, reason = torch.device(device).type, None
    if special := weights in PACKED_WEIGHTS:
        if kind != "cpu":
            reason = f"runs on a CPU, not on {kind}; use executor.device=cpu"
        elif dtype != torch.bfloat16:
            reason = f"is for executor.dtype=bfloat16, not {str(dtype).removeprefix('torch.')}"
        elif not kernels:
            reason = "is computed by a kernel, and executor.kernels=false allows none"
    try:
        if kernels and reason is None and kind == "cpu" and dtype in (torch.float32, torch.bfloat16):
            return CpuOps(weights=weights, dtype=dtype)
    except KernelError as error:  # `load` has logged it
        reason = f"needs the native kernels: {error}"
    if special:
        raise ConfigError("executor.weights", weights, f"{reason}; or use executor.weights=auto")
    if kernels and kind == "cuda" and find_spec("triton") is not None:
        from kvlab.models.ops.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()
