"""RMSNorm with a residual against a few lines of double precision."""

from __future__ import annotations

import pytest
import torch

from kvlab.kernels.triton.rms_norm import rms_norm
from tests.kernels.grids import folded
from tests.kernels.paged import assert_close

EPS = 1e-6


def plain_norm(x: torch.Tensor, weight: torch.Tensor, offset: bool) -> torch.Tensor:
    x, weight = x.double(), weight.double() + offset
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@folded
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 80, 1000, 1024, 4097])
def test_norm(width: int, dtype: torch.dtype, offset: bool, device: torch.device) -> None:
    x, weight = torch.randn(3, width).to(device, dtype), torch.randn(width).to(device, dtype)
    before = x.clone()
    assert_close(rms_norm(x, weight, EPS, offset=offset), plain_norm(x, weight, offset))
    assert torch.equal(x, before)


@folded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 80, 1000, 4097])
def test_residual(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(3, width).to(device, dtype), torch.randn(3, width).to(device)
    weight, before = torch.randn(width).to(device, dtype), x.clone()
    total = residual.double() + x.double()
    found = rms_norm(x, weight, EPS, residual=residual)
    assert_close(residual, total)
    assert torch.equal(x, before)
    assert_close(found, plain_norm(residual, weight, False))  # of the sum as it was stored


def test_heads_that_are_a_part_of_something_wider(device: torch.device) -> None:
    qkv, weight = torch.randn(5, 8, 80, device=device), torch.randn(80, device=device)
    q = qkv[:, 2:6]
    found = rms_norm(q, weight, EPS)
    assert found.is_contiguous()
    assert_close(found, plain_norm(q, weight, False))


def test_zeros_stay_zeros(device: torch.device) -> None:
    x = torch.zeros(2, 80, device=device)
    assert torch.equal(rms_norm(x, torch.ones(80, device=device), EPS), x)


def test_no_rows(device: torch.device) -> None:
    assert rms_norm(torch.randn(0, 80, device=device), torch.ones(80, device=device), EPS).shape == (0, 80)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.randn(3, 80, device=device), torch.ones(80, device=device)
    with pytest.raises(ValueError, match="a weight"):
        rms_norm(x, weight[:79], EPS)
    with pytest.raises(ValueError, match="adjacent"):
        rms_norm(x.t().contiguous().t(), weight, EPS)
    with pytest.raises(ValueError, match="residual"):
        rms_norm(x, weight, EPS, residual=x[:2])
