"""The rotary kernel against `models/rope.py`."""

from __future__ import annotations

import pytest
import torch

from kvlab.kernels.triton.rotary import rotate_in_place
from kvlab.models.rope import rotate
from tests.kernels.grids import folded
from tests.kernels.paged import assert_close

HEADS = [(1, 1), (8, 2), (6, 3)]


def table(rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of random angles, the two halves not even equal."""
    angles = torch.rand(rows, head_dim) * 6.3
    sign = torch.ones(head_dim)
    sign[: head_dim // 2] = -1
    return angles.cos().to(device, dtype), (angles.sin() * sign).to(device, dtype)


def check(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> None:
    each = slice(None) if rows is None else rows
    angles = [part[each].double().unsqueeze(1) for part in (cos, sin)]
    expected = [rotate(x.double(), *angles) for x in (q, k)]
    rotate_in_place(q, k, cos, sin, rows)
    for found, wanted in zip((q, k), expected, strict=True):
        assert_close(found, wanted)


@folded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_one_table_for_all(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 39, 7, 7, 12], device=device)
    q, k = (torch.randn(5, count, head_dim).to(device, dtype) for count in heads)
    check(q, k, *table(40, head_dim, dtype, device), positions)


@folded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_a_table_for_each(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    q, k = (torch.randn(5, count, head_dim).to(device, dtype) for count in heads)
    check(q, k, *table(5, head_dim, dtype, device), None)


def test_float32_angles_for_bfloat16(device: torch.device) -> None:
    q, k = (torch.randn(5, count, 64).to(device, torch.bfloat16) for count in (4, 2))
    check(q, k, *table(5, 64, torch.float32, device), None)


def test_parts_of_something_wider_and_nothing_beside_them(device: torch.device) -> None:
    qkv = torch.randn(4, 8, 64, device=device)
    before = qkv.clone()
    q, k, v = qkv.split([4, 2, 2], dim=1)
    check(q, k, *table(4, 64, torch.float32, device), None)
    assert torch.equal(v, before[:, 6:])
    assert not torch.equal(q, before[:, :4])


def test_no_tokens(device: torch.device) -> None:
    q = torch.randn(0, 4, 64, device=device)
    rotate_in_place(q, q[:, :2], *table(40, 64, torch.float32, device), torch.arange(0, device=device))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    q = torch.randn(3, 4, 64, device=device)
    cos, sin = table(5, 64, torch.float32, device)
    with pytest.raises(ValueError, match="angles of 5 tokens for 3"):
        rotate_in_place(q, q, cos, sin)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_in_place(q, q, cos[:, :32], sin[:, :32], torch.arange(3, device=device))
    with pytest.raises(ValueError, match="must be even"):
        rotate_in_place(q[..., :63], q[..., :63], cos[:3, :63], sin[:3, :63])
