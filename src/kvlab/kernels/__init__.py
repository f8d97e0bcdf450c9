"""Kernels and nothing else: tensors in, tensors out; no pool, no view, no model."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def triton_runs_on(device: torch.device) -> bool:
    """Whether what has a Triton kernel should be computed by it: on a GPU, where triton is installed."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
