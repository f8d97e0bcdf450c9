"""Native norms, rotary angles and gate against PyTorch, built for three instruction sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from kvlab.kernels.cpu.elementwise import gated, rms_norm, rotate_and_store
from kvlab.kernels.cpu.native import load
from kvlab.models.config import RopeConfig
from kvlab.models.rope import RotaryEmbedding, rotate
from tests.kernels.grids import folded
from tests.kernels.tiled_rows import put_in_tiles, take_from_tiles

pytestmark = pytest.mark.usefixtures("cpu_architecture")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SIZES = [1, 13, 64, 1000, 2560]
NAN = float("nan")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    scale = max(1e-30, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance * scale, rtol=tolerance)


norms = pytest.mark.parametrize(
    ("rows", "size", "dtype"), [(rows, size, dtype) for rows in (1, 13, 70) for size in SIZES for dtype in DTYPES]
)


class TestRmsNorm:
    @folded
    @norms
    def test_alone(self, rows: int, size: int, dtype: torch.dtype) -> None:
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
        expected = functional.rms_norm(x.double(), (size,), weight.double(), 1e-6)
        assert_close(rms_norm(x, weight, 1e-6), expected)

    @folded
    @norms
    def test_of_a_sum(self, rows: int, size: int, dtype: torch.dtype) -> None:
        x, weight, residual = (
            torch.randn(rows, size).to(dtype),
            torch.randn(size).to(dtype),
            torch.randn(rows, size),
        )
        total = x + residual
        found = rms_norm(x, weight, 1e-6, residual)
        assert torch.equal(residual, total)
        assert_close(found, functional.rms_norm(total.double(), (size,), weight.double(), 1e-6))

    @folded
    @norms
    def test_weights_in_float32(self, rows: int, size: int, dtype: torch.dtype) -> None:
        x, weight = torch.randn(rows, size).to(dtype), 1 + 0.01 * torch.randn(size)
        assert_close(rms_norm(x, weight, 1e-6), functional.rms_norm(x.double(), (size,), weight.double(), 1e-6))


@folded
@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize("size", [32, 96, 2560])
def test_norms_in_tiles(size: int, rows: int) -> None:
    x, weight = torch.randn(rows, size).bfloat16(), torch.randn(size).bfloat16()
    tiles = put_in_tiles(torch.full_like(x, NAN))
    pointers = x.data_ptr(), None, weight.data_ptr(), 1e-6, rows, size, tiles.data_ptr()
    load().kvlab_rms_norm(*pointers, True, x.element_size(), weight.element_size(), torch.get_num_threads())
    assert torch.equal(take_from_tiles(tiles, rows), rms_norm(x, weight, 1e-6))
    assert tiles.isnan().sum() == -rows % 16 * size  # beyond the last row nothing is written


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(gelu: bool, size: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(13, 2 * size)).to(dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    assert_close(gated(gate_up, gelu=gelu), activated * up)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 64), (6, 1, 80), (4, 4, 26), (3, 1, 256)]
)
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    tokens, block_size, blocks = 13, 16, 5
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    rotary = RotaryEmbedding(RopeConfig(10_000.0), head_dim, 300, dtype)
    positions = torch.randint(300, (tokens,))
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[3] = -1
    keys = torch.full((blocks, kv_heads, block_size, head_dim), NAN, dtype=dtype)
    values = torch.full_like(keys, NAN)
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)] if normed else [None, None]
    found = rotate_and_store(
        qkv,
        keys,
        values,
        *rotary.tables,
        positions,
        slots,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-6,
    )

    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = (functional.rms_norm(x, (head_dim,), w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    q, k = (rotate(x.double(), *(table.double() for table in rotary.tables.at(positions))) for x in (q, k))
    assert_close(found, q)
    expected_keys, expected_values = keys.clone().fill_(NAN).double(), values.clone().fill_(NAN)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_keys[slot // block_size, :, slot % block_size] = k[token]
            expected_values[slot // block_size, :, slot % block_size] = v[token]
    assert torch.equal(keys.isnan(), expected_keys.isnan())
    assert_close(keys.nan_to_num(), expected_keys.nan_to_num())
    assert torch.equal(values.nan_to_num(), expected_values.nan_to_num())
    assert torch.equal(values.isnan(), expected_values.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_tokens_and_change_nothing(dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim = 200, 4, 2, 64
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    rotary = RotaryEmbedding(RopeConfig(10_000.0), head_dim, 300, dtype)
    slots, weight = torch.randperm(13 * 16)[:tokens], torch.randn(head_dim).to(dtype)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            keys, values = torch.zeros(2, 13, kv_heads, 16, head_dim, dtype=dtype)
            positions = torch.arange(tokens)
            norms: dict[str, Any] = {"q_weight": weight, "k_weight": weight, "eps": 1e-6}
            q = rotate_and_store(qkv, keys, values, *rotary.tables, positions, slots, **norms)
            gate = gated(qkv.view(tokens, -1), gelu=False)
            found.append((q, keys, values, gate, rms_norm(qkv.view(tokens, -1), weight.repeat(8), 1e-6)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
