"""Writing K and V through a slot mapping, against indexing."""

from __future__ import annotations

import pytest
import torch

from kvlab.kernels.triton.scatter import scatter_kv
from tests.kernels.grids import folded
from tests.kernels.paged import bits, unchanged


def canaries(block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(9, 2, block_size, head_dim).to(device, dtype) for _ in range(2)]


@folded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("count", [1, 7, 50])
def test_writes_there_and_nowhere_else(
    count: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    keys, values = canaries(block_size, head_dim, dtype, device)
    slots = torch.randperm(9 * block_size)[:count].to(device)
    count = len(slots)
    slots[::3] = -1
    # As projections leave them: K and V side by side, not contiguous.
    k, v = torch.randn(count, 5, head_dim).to(device, dtype)[:, 1:].split(2, dim=1)
    expected = [keys.clone(), values.clone()]
    written = slots >= 0
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    for cache, new in zip(expected, (k, v), strict=True):
        cache[blocks, :, offsets] = new[written]
    scatter_kv(k, v, keys, values, slots)
    assert unchanged(bits(*expected), keys, values)


@pytest.mark.parametrize("slots", [[], [-1, -1, -1]])
def test_nothing_to_write(slots: list[int], device: torch.device) -> None:
    keys, values = canaries(16, 64, torch.float32, device)
    before = bits(keys, values)
    k, v = torch.randn(2, len(slots), 2, 64, device=device)
    scatter_kv(k, v, keys, values, torch.tensor(slots, dtype=torch.int64, device=device))
    assert unchanged(before, keys, values)


def test_one_layer_of_many(device: torch.device) -> None:
    storage = torch.zeros(2, 3, 5, 2, 16, 64, device=device)
    k, v = torch.randn(2, 4, 2, 64, device=device)
    scatter_kv(k, v, storage[0, 1], storage[1, 1], torch.tensor([0, 16, 33, 79], device=device))
    assert (storage[:, 1].abs().sum((-1, -3)) > 0).sum() == 8
    assert not storage[:, [0, 2]].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    keys, values = canaries(16, 64, torch.float32, device)
    k = torch.randn(3, 2, 64, device=device)
    slots = torch.arange(3, device=device)
    with pytest.raises(ValueError, match="2 slots"):
        scatter_kv(k, k, keys, values, slots[:2])
    with pytest.raises(ValueError, match="for a cache of"):
        scatter_kv(k[:, :1], k[:, :1], keys, values, slots)
    with pytest.raises(ValueError, match="one layout"):
        scatter_kv(k, k, keys, values[:5], slots)
    with pytest.raises(ValueError, match="adjacent"):
        scatter_kv(k.transpose(1, 2).contiguous().transpose(1, 2), k, keys, values, slots)
