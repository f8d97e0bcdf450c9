"""The paged decode kernel against plain attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlab.kernels.triton.decode import paged_decode, plan_split
from tests.kernels.grids import folded
from tests.kernels.paged import NAN, Paged, assert_close, bits, make_paged, plain_attention, unchanged

pytestmark = pytest.mark.slow  # Triton's interpreter computes number by number

SCALE = 0.2
HEADS = {"1 to 1": (2, 2), "4 to 1": (8, 2), "all to 1": (8, 1), "3 to 1": (6, 2)}


def lengths_around(block_size: int, many: int = 150) -> list[int]:
    return [0, 1, block_size - 1, block_size, block_size + 1, many]


def check(q: torch.Tensor, paged: Paged, split_tokens: int | None = None, **options: Any) -> None:
    """The kernel's answer is plain attention's, and the cache is as it was."""
    before = bits(paged.keys, paged.values)
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device)
    found = paged_decode(q, *paged.cache, scale=SCALE, out=out, split_tokens=split_tokens, **options)
    assert found is out
    rows = [
        plain_attention(q[row : row + 1], k, v, scale=SCALE, **options)
        for row, (k, v) in enumerate(zip(paged.k, paged.v, strict=True))
    ]
    assert_close(found, torch.cat(rows))
    assert unchanged(before, paged.keys, paged.values)


def draw(
    heads: str, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device, many: int = 150
) -> tuple[torch.Tensor, Paged]:
    q_heads, kv_heads = HEADS[heads]
    lengths = lengths_around(block_size, many)
    q = torch.randn(len(lengths), q_heads, head_dim).to(device, dtype)
    return q, make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)


@folded
@pytest.mark.parametrize("block_size", [1, 16, 24, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", ["1 to 1", "4 to 1", "all to 1"])
def test_every_shape(heads: str, head_dim: int, block_size: int, device: torch.device) -> None:
    check(*draw(heads, head_dim, block_size, torch.float32, device, many=70))


@folded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("heads", list(HEADS))
def test_half_precision(heads: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(*draw(heads, head_dim, 16, dtype, device))


@folded
@pytest.mark.parametrize("soft_cap", [None, 30.0, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 130, 1000])
def test_window_and_soft_cap(window: int | None, soft_cap: float | None, device: torch.device) -> None:
    check(*draw("4 to 1", 64, 16, torch.float32, device), window=window, soft_cap=soft_cap)


@folded
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("split_tokens", [1, 16, 17, 64, 149, 150, 1000])
def test_splits(split_tokens: int, window: int | None, device: torch.device) -> None:
    """More splits than the kernel allows (150 of one token) are fewer and larger ones."""
    check(*draw("4 to 1", 64, 16, torch.float32, device), split_tokens, window=window)


@folded
@pytest.mark.parametrize("heads", list(HEADS))
def test_splits_in_bfloat16(heads: str, device: torch.device) -> None:
    check(*draw(heads, 80, 24, torch.bfloat16, device), 32, soft_cap=20.0)


def test_a_sequence_in_one_large_block(device: torch.device) -> None:
    q = torch.randn(2, 4, 64, device=device)
    check(q, make_paged([300, 7], 2, 64, 512, torch.float32, device), 128)


def test_longest_spares_programs_and_changes_nothing(device: torch.device) -> None:
    q, paged = draw("4 to 1", 64, 16, torch.float32, device)
    found, expected = (paged_decode(q, *paged.cache, scale=SCALE, split_tokens=32, longest=n) for n in (150, 300))
    assert_close(found, expected)


def test_only_sequences_with_one_query_of_a_ragged_batch(device: torch.device) -> None:
    paged = make_paged([20, 33, 5, 18, 40], 2, 64, 16, torch.float32, device)
    query_start = torch.tensor([0, 1, 4, 5, 5, 6], dtype=torch.int32, device=device)
    q = torch.randn(6, 8, 64, device=device)
    for split_tokens in (None, 16):
        out = torch.full_like(q, NAN)
        paged_decode(q, *paged.cache, scale=SCALE, query_start=query_start, out=out, split_tokens=split_tokens)
        assert out[1:4].isnan().all()
        for token, sequence in ((0, 0), (4, 2), (5, 4)):
            expected = plain_attention(q[token : token + 1], paged.k[sequence], paged.v[sequence], scale=SCALE)
            assert_close(out[token : token + 1], expected)


def test_queries_that_are_a_part_of_something_wider(device: torch.device) -> None:
    _, paged = draw("4 to 1", 64, 16, torch.float32, device)
    qkv = torch.randn(6, 12, 64, device=device)
    check(qkv[:, :8], paged)


def test_nobody(device: torch.device) -> None:
    paged = make_paged([0, 0], 2, 64, 16, torch.float32, device)
    nobody = [tensor[:0] for tensor in (paged.block_tables, paged.seq_lens)]
    q = torch.randn(2, 2, 64, device=device)
    assert paged_decode(q[:0], paged.keys, paged.values, *nobody, scale=SCALE).shape == (0, 2, 64)
    check(q, paged)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes 9 GB")
def test_a_cache_of_more_than_two_to_the_31_numbers(device: torch.device) -> None:
    small = make_paged([40], 2, 128, 16, torch.bfloat16, device)
    far = (1 << 31) // small.keys[0].numel()
    keys = torch.zeros(far + len(small.keys), *small.keys.shape[1:], dtype=torch.bfloat16, device=device)
    values = torch.zeros_like(keys)
    keys[far:], values[far:] = small.keys, small.values
    q = torch.randn(1, 8, 128).to(device, torch.bfloat16)
    found = paged_decode(q, keys, values, small.block_tables + far, small.seq_lens, scale=SCALE)
    assert_close(found, plain_attention(q, small.k[0], small.v[0], scale=SCALE))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    q, paged = draw("4 to 1", 64, 16, torch.float32, device)
    with pytest.raises(ValueError, match="does not fit a cache"):
        paged_decode(q[:, :7], *paged.cache, scale=SCALE)
    with pytest.raises(ValueError, match="one layout"):
        paged_decode(q, paged.keys, paged.values[:, :1], paged.block_tables, paged.seq_lens, scale=SCALE)
    with pytest.raises(ValueError, match="one type"):
        paged_decode(q.bfloat16(), *paged.cache, scale=SCALE)
    with pytest.raises(ValueError, match="adjacent"):
        paged_decode(q.transpose(1, 2).contiguous().transpose(1, 2), *paged.cache, scale=SCALE)
    with pytest.raises(ValueError, match="for 3 sequences"):
        paged_decode(q, *paged.cache[:3], paged.seq_lens[:3], scale=SCALE)


def test_splits_are_planned_for_long_sequences_alone() -> None:
    cpu = torch.device("cpu")
    assert plan_split(200, 200, 8, cpu) is None
    assert plan_split(0, 0, 8, cpu) is None
    # One long sequence among short ones is shared out, as if all tokens were.
    assert plan_split(11_000, 10_000, 1, cpu) == 5_500
