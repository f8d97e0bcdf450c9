"""The native CPU kernel against plain attention, built for three instruction sets."""

from __future__ import annotations

from contextlib import suppress
from inspect import unwrap

import pytest
import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.attention import paged_attention
from kvlab.kernels.cpu.native import load_formats
from kvlab.kv.formats import FORMATS
from tests.kernels.conftest import ARCHITECTURES, build_for
from tests.kernels.grids import folded
from tests.kernels.paged import assert_close, bits, make_paged, plain_attention, unchanged

SCALE = 0.2
HEADS = {
    "1 to 1": (2, 2),
    "2 to 1": (4, 2),
    "3 to 1": (6, 2),
    "4 to 1": (8, 2),
    "all to 1": (8, 1),
    "130 to 1": (130, 1),
}
GROUPS = list(HEADS)[:-1]
DTYPES = [torch.float32, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("cpu_architecture")


def check(
    sequences: list[tuple[int, int]],
    heads: str,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Sequences of (length, new tokens): each gets plain attention; NaN around their tokens is neither read nor
    written.
    """
    q_heads, kv_heads = HEADS[heads]
    new = [count for _, count in sequences]
    paged = make_paged(
        [length for length, _ in sequences], kv_heads, head_dim, block_size, dtype, torch.device("cpu")
    )
    q = torch.randn(sum(new), q_heads, head_dim).to(dtype)
    before = bits(paged.keys, paged.values)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    found = paged_attention(q, *paged.cache, starts, scale=SCALE, window=window, soft_cap=soft_cap)
    rows = [
        plain_attention(q[starts[i] : starts[i + 1]], k, v, scale=SCALE, window=window, soft_cap=soft_cap)
        for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True))
    ]
    assert_close(found, torch.cat(rows))
    assert unchanged(before, paged.keys, paged.values)


def decodes(block_size: int) -> list[tuple[int, int]]:
    return [(0, 0), (1, 1), (block_size + 1, 1), (2 * block_size, 1), (150, 1)]


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 24, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", GROUPS)
def test_decode(heads: str, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    check(decodes(block_size), heads, head_dim, block_size, dtype)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 13, 64, 80])
@pytest.mark.parametrize("heads", GROUPS)
def test_prefill_chunks_and_decodes_in_one_batch(heads: str, head_dim: int, dtype: torch.dtype) -> None:
    check([(130, 130), (1, 1), (70, 3), (0, 0), (200, 100), (33, 1)], heads, head_dim, 16, dtype)


@folded
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (128, 24), (80, 32), (32, 1)])
@pytest.mark.parametrize("heads", ["2 to 1", "3 to 1"])
def test_long_prefill(heads: str, head_dim: int, block_size: int, window: int | None) -> None:
    """Many rows over many keys: matrix tiles, where there are any, take them in several visits."""
    check([(530, 530), (700, 9), (601, 200)], heads, head_dim, block_size, torch.bfloat16, window=window)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [1, 5, 64, 65, 1000])
def test_window_and_soft_cap(window: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    check([(150, 150), (150, 1), (150, 2), (7, 7)], "4 to 1", 64, 16, dtype, window=window, soft_cap=soft_cap)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sequence", [(1000, 1), (1000, 2), (129, 1)])
def test_a_lone_sequence_is_split_over_threads(sequence: tuple[int, int], threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check([sequence], "4 to 1", 64, 16, dtype)
        check([sequence], "all to 1", 64, 16, dtype, window=300)
    finally:
        torch.set_num_threads(before)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key_format", "value_format", "head_dim"),
    [
        *((name, name, head_dim) for name in ("int8", "fp8_e4m3", "fp8_e5m2") for head_dim in (13, 64, 80)),
        *(("int4", "int4", head_dim) for head_dim in (32, 96, 128)),
        *(("int8", "int4", 64), ("int4", "fp8_e5m2", 96), ("plain", "fp8_e4m3", 80), ("int4", "plain", 64)),
    ],
)
@pytest.mark.parametrize("heads", GROUPS)
def test_formats(heads: str, key_format: str, value_format: str, head_dim: int, dtype: torch.dtype) -> None:
    """The same as attention over the numbers that are stored; NaN in the scales of others would show."""
    q_heads, kv_heads = HEADS[heads]
    sequences = [(130, 130), (1, 1), (70, 3), (200, 100), (33, 1), (150, 1)]
    new = [count for _, count in sequences]
    paged = make_paged([length for length, _ in sequences], kv_heads, head_dim, 16, dtype, torch.device("cpu"))
    plain = str(dtype).removeprefix("torch.")
    formats = [FORMATS[plain if name == "plain" else name] for name in (key_format, value_format)]
    stored = [kind.pack(cache) for kind, cache in zip(formats, (paged.keys, paged.values), strict=True)]
    q, starts = torch.randn(sum(new), q_heads, head_dim).to(dtype), torch.tensor([0, *new]).cumsum(0).int()
    found = paged_attention(
        q,
        stored[0][0],
        stored[1][0],
        *paged.cache[2:],
        starts,
        scale=SCALE,
        key_scales=stored[0][1],
        value_scales=stored[1][1],
    )
    rows = []
    for i, kv in enumerate(zip(paged.k, paged.v, strict=True)):
        k, v = (kind.unpack(*kind.pack(whole)) for kind, whole in zip(formats, kv, strict=True))
        rows.append(plain_attention(q[starts[i] : starts[i + 1]], k, v, scale=SCALE))
    assert_close(found, torch.cat(rows))


def test_libraries_of_other_instruction_sets_leave_this_one_its_readers_of_formats(
    cpu_architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have several libraries. The loader must not give them one copy of a variable."""
    with monkeypatch.context() as patch:
        for other in ARCHITECTURES:
            build_for(other, patch)
            with suppress(KernelError):  # this processor lacks its instructions
                load_formats()
    for head_dim in (64, 80):
        unwrap(test_formats)("2 to 1", "int8", "fp8_e5m2", head_dim, torch.bfloat16)
        unwrap(test_formats)("1 to 1", "int4", "int4", 96, torch.float32)


@pytest.mark.parametrize("rising", [True, False])
def test_scores_that_rise_or_fall_by_hundreds(rising: bool) -> None:
    """Weights relative to the first scores alone would overflow, or all be zero."""
    paged = make_paged([530], 2, 64, 16, torch.bfloat16, torch.device("cpu"))
    q, starts = torch.randn(530, 4, 64).bfloat16(), torch.tensor([0, 530], dtype=torch.int32)
    for position in range(530):
        factor = 1 + (position if rising else 529 - position) // 40 * 4
        paged.k[0][position] *= factor
        paged.keys[paged.block_tables[0, position // 16], :, position % 16] *= factor
    found = paged_attention(q, *paged.cache, starts, scale=SCALE)
    assert_close(found, plain_attention(q, paged.k[0], paged.v[0], scale=SCALE))


def test_more_query_heads_to_a_kv_head_than_rows_of_a_tile() -> None:
    check([(40, 1), (40, 3)], "130 to 1", 16, 16, torch.float32)


def test_queries_inside_a_wider_tensor() -> None:
    """As they are when the projections of q, k and v are one."""
    paged = make_paged([20, 9], 2, 64, 16, torch.float32, torch.device("cpu"))
    q = torch.randn(2, 12, 64)[:, :8]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = paged_attention(q, *paged.cache, starts, scale=SCALE)
    rows = [plain_attention(q[i : i + 1], paged.k[i], paged.v[i], scale=SCALE) for i in range(2)]
    assert_close(found, torch.cat(rows))


def test_large_scores_do_not_overflow() -> None:
    paged = make_paged([90], 2, 64, 16, torch.float32, torch.device("cpu"))
    q = 1e4 * torch.randn(1, 8, 64)
    found = paged_attention(q, *paged.cache, torch.tensor([0, 1], dtype=torch.int32), scale=1.0)
    assert_close(found, plain_attention(q, paged.k[0], paged.v[0], scale=1.0))
