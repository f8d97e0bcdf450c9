"""The largest numbers of a row, native, against PyTorch's and Python's own order; for three instruction sets."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvlab.kernels.cpu.elementwise import topk
from kvlab.kernels.cpu.native import load
from kvlab.models.ops.torch_ops import TorchOps
from tests.kernels.grids import folded

pytestmark = pytest.mark.usefixtures("cpu_architecture")

DTYPES = [torch.float32, torch.bfloat16]
#: Rows and their sizes.
SHAPES = [*((rows, size) for rows in (1, 13) for size in (1, 7, 33, 1000)), (1, 151_936), (2, 151_936)]
NAN, INF = float("nan"), float("inf")
CANARY = 7777


def expected(x: torch.Tensor, count: int) -> list[list[int]]:
    """By Python's stable sort: NaN first, then the largest, of equals the first."""
    return [
        sorted(range(len(row)), key=lambda place: (row[place] == row[place], -row[place]))[:count]
        for row in x.tolist()
    ]


def check(x: torch.Tensor, count: int) -> None:
    values, places = topk(x, count)
    twin = TorchOps().topk(x, count)
    assert places.tolist() == twin.indices.tolist()
    assert values.dtype == twin.values.dtype == x.dtype
    torch.testing.assert_close(values, x.gather(1, places), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(twin.values, values, rtol=0, atol=0, equal_nan=True)


def draw(kind: str, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that differ in how many of their numbers are equal, and in what order these come."""
    x = torch.randn(rows, size)
    if kind == "few values":
        x = torch.randint(-3, 4, (rows, size)) / 2.0
    elif kind == "all equal":
        x = torch.zeros(rows, size)
        x[:, ::2] = -0.0
    elif kind == "ascending":
        x = torch.arange(size).expand(rows, -1) * 1.0
    elif kind == "descending":
        x = -torch.arange(size).expand(rows, -1) * 1.0
    elif kind == "barred":
        x[torch.rand(rows, size) < 0.9] = -INF
    elif kind == "nothing else":
        x[:] = -INF
    elif kind == "unsound":
        x[torch.rand(rows, size) < 0.2] = NAN
        x[torch.rand(rows, size) < 0.1] = INF
        x[torch.rand(rows, size) < 0.1] = -NAN
    return x.to(dtype)


KINDS = ["random", "few values", "all equal", "ascending", "descending", "barred", "nothing else", "unsound"]


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_its_twin(kind: str, rows: int, size: int, dtype: torch.dtype) -> None:
    x = draw(kind, rows, size, dtype)
    for count in (1, 2, 20, 600):
        if count <= size:
            check(x, count)
    if size <= 1000:
        check(x, size)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_is_pythons_stable_order(kind: str, count: int, dtype: torch.dtype) -> None:
    """Of the kernel and of its twin."""
    x = draw(kind, 13, 200, dtype)
    assert topk(x, count)[1].tolist() == expected(x, count)
    assert TorchOps().topk(x, count).indices.tolist() == expected(x, count)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    x = torch.zeros(150, 150, dtype=dtype)
    x.fill_diagonal_(1.0)
    assert topk(x, 1)[1].flatten().tolist() == list(range(150))
    assert topk(x, 2)[1].tolist() == [[0, 1], *([row, 0] for row in range(1, 150))]


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_inside_a_wider_tensor(count: int, dtype: torch.dtype) -> None:
    wide = torch.full((5, 50), INF, dtype=dtype)
    wide[:, 10:30] = torch.randn(5, 20)
    check(wide[:, 10:30], count)
    check(wide[:, 10:30].T.contiguous().T, count)  # columns apart
    check(wide[0, 10:30].expand(6, -1), count)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 90])
def test_writes_its_results_and_nothing_else(count: int, dtype: torch.dtype) -> None:
    rows, size = 3, 90
    x = torch.randn(rows, size).to(dtype)
    values = torch.full((2 + rows * count,), CANARY, dtype=dtype)
    places = torch.full((2 + rows * count,), CANARY)
    at = [ctypes.c_void_p(tensor[start:].data_ptr()) for tensor, start in ((x, 0), (values, 1), (places, 1))]
    load().kvlab_topk(at[0], ctypes.c_int64(size), rows, ctypes.c_int64(size), count, *at[1:], x.element_size(), 2)
    for tensor in (values, places):
        assert tensor[0] == tensor[-1] == torch.tensor(CANARY, dtype=tensor.dtype)
    assert places[1:-1].view(rows, count).tolist() == expected(x, count)
    assert torch.equal(values[1:-1].view(rows, count), x.gather(1, places[1:-1].view(rows, count)))


def test_no_rows() -> None:
    assert [part.shape for part in topk(torch.empty(0, 9), 3)] == [(0, 3)] * 2


@pytest.mark.parametrize("count", [0, 10])
def test_more_than_there_are_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"top-k with k={count} of 9 numbers"):
        topk(torch.zeros(2, 9), count)
