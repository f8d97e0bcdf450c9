"""The ragged prefill kernel against plain attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlab.kernels.triton.prefill import paged_prefill
from tests.kernels.grids import folded
from tests.kernels.paged import NAN, assert_close, bits, make_paged, plain_attention, unchanged

pytestmark = pytest.mark.slow  # Triton's interpreter computes number by number

SCALE = 0.2


def chunks_around(block_size: int) -> list[tuple[int, int]]:
    """(cached, new) tokens: whole prompts, chunks behind a cached prefix, single tokens, and none at all."""
    b = block_size
    return [(0, b + 1), (b, b), (3, 0), (0, 1), (2 * b + 1, 3), (0, 0), (b - 1, 1), (7, 50)]


def check(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    least: int = 1,
    **options: Any,
) -> None:
    """The kernel's answer is plain attention's, the rows it is not to touch and the cache are as they were."""
    q_heads, kv_heads = heads
    new = [count for _, count in chunks]
    paged = make_paged([sum(chunk) for chunk in chunks], kv_heads, head_dim, block_size, dtype, device)
    before = bits(paged.keys, paged.values)
    q = torch.randn(sum(new), q_heads, head_dim).to(device, dtype)
    starts = torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)
    out = torch.full(q.shape, NAN, dtype=dtype, device=device)
    assert paged_prefill(q, *paged.cache, starts, scale=SCALE, least=least, out=out, **options) is out
    for queries, rows, k, v in zip(q.split(new), out.split(new), paged.k, paged.v, strict=True):
        if len(queries) < least:
            assert rows.isnan().all()
        else:
            assert_close(rows, plain_attention(queries, k, v, scale=SCALE, **options))
    assert unchanged(before, paged.keys, paged.values)


@folded
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_every_shape(heads: tuple[int, int], head_dim: int, block_size: int, device: torch.device) -> None:
    check(chunks_around(block_size), heads, head_dim, block_size, torch.float32, device)


@folded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_half_precision(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(chunks_around(16), heads, head_dim, 16, dtype, device)


@folded
@pytest.mark.parametrize("soft_cap", [None, 30.0, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
def test_window_and_soft_cap(window: int | None, soft_cap: float | None, device: torch.device) -> None:
    check(chunks_around(16), (4, 2), 64, 16, torch.float32, device, window=window, soft_cap=soft_cap)


def test_windows_much_shorter_than_the_prefix(device: torch.device) -> None:
    """Rows that see none of a tile's keys, and tiles that nobody sees."""
    check([(300, 70), (0, 200)], (2, 1), 64, 16, torch.float32, device, window=20)
    check([(300, 70), (0, 200)], (2, 1), 64, 16, torch.bfloat16, device, window=20)


def test_more_query_heads_than_rows_in_a_tile(device: torch.device) -> None:
    check([(3, 9), (0, 1)], (71, 1), 64, 16, torch.float32, device)
    check([(3, 9), (0, 1)], (71, 1), 64, 16, torch.bfloat16, device)


def test_sequences_with_fewer_tokens_than_the_least_are_left_alone(device: torch.device) -> None:
    check(chunks_around(16), (4, 2), 64, 16, torch.float32, device, least=2)


def test_single_tokens_only(device: torch.device) -> None:
    check([(length, 1) for length in range(0, 40, 3)], (4, 2), 64, 16, torch.float32, device)


def test_nobody(device: torch.device) -> None:
    check([(5, 0), (0, 0)], (4, 2), 64, 16, torch.float32, device)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    paged = make_paged([5], 2, 64, 16, torch.float32, device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="query_start for 1 sequences"):
        paged_prefill(torch.randn(5, 4, 64, device=device), *paged.cache, starts[:1], scale=SCALE)
    with pytest.raises(ValueError, match="does not fit a cache"):
        paged_prefill(torch.randn(5, 4, 80, device=device), *paged.cache, starts, scale=SCALE)
