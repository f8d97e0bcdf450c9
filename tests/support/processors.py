"""Processors with and without instructions for bfloat16, as PyTorch sees them, on any processor."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvlab.models.ops import torch_ops

_PACKS = torch_ops.packs_bfloat16()


def as_on_a_processor(monkeypatch: pytest.MonkeyPatch, *, packs: bool) -> None:
    """Where oneDNN does not pack bfloat16 and a test wants it to, a copy stands in for the packed weight, and the
    float32 product, rounded once, for its product.
    """
    monkeypatch.setattr(torch_ops, "packs_bfloat16", lambda: packs)
    if packs and not _PACKS:
        monkeypatch.setattr(torch_ops, "_pack", torch.clone)
        monkeypatch.setattr(torch_ops, "_packed_linear", _product)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
