"""Native products in integers against the same in PyTorch, to the last bit, built for four instruction sets.

Where there are matrix tiles, they take inputs of whole tiles from MANY rows on.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu import w8a8
from kvlab.kernels.cpu.elementwise import gated, topk
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import instruction_set, int8_path, load, paths
from kvlab.kernels.cpu.paths import Paths, take
from tests.kernels.conftest import ARCHITECTURES
from tests.kernels.grids import folded

# AVX-512 without VNNI has a way of its own here.
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("skylake-avx512", *ARCHITECTURES)]
pytestmark = pytest.mark.parametrize("cpu_architecture", ["native", *OTHERS], indirect=True)

CANARY, MANY, TILE_INPUTS = 7777.0, 5, 64
KINDS = ("normal", "outliers", "extremes", "zeros")


def draw(kind: str, *shape: int) -> torch.Tensor:
    """Numbers as activations have them, or all at a limit: there 16 bits would not hold two products."""
    normal = torch.randn(*shape)
    match kind:
        case "outliers":
            normal = normal**3
        case "extremes":
            normal = normal.sign()
        case "zeros":
            normal[::2] = 0
    return normal.bfloat16()


def packed(weight: torch.Tensor) -> PackedWeight:
    return PackedWeight(weight, WeightFormat.INT8_W8A8)


def in_tiles(rows: int, inputs: int) -> bool:
    return "amx" in int8_path() and rows >= MANY and inputs % TILE_INPUTS == 0


@pytest.mark.usefixtures("cpu_architecture")
@folded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12, 13, 25, 49, 65, 129])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(1, 1), (17, 33), (64, 1023), (1000, 64), (70, 1000), (9, 6208), (9, 66), (96, 6208), (33, 704)],
)
def test_gives_the_reference_to_the_last_bit(rows: int, outputs: int, inputs: int, kind: str) -> None:
    weight, bias, x = draw(kind, outputs, inputs), draw("normal", outputs), draw(kind, rows, inputs)
    expected, product = w8a8.multiply(x, weight), packed(weight)
    assert torch.equal(product.multiply(x, in_float32=True), expected)
    assert torch.equal(product.multiply(x), expected.bfloat16())
    fused = product.multiply(x, bias, in_float32=True)  # the bias is added without rounding the product first
    torch.testing.assert_close(
        fused, w8a8.multiply(x, weight, bias), rtol=1e-6, atol=1e-6 * float(expected.abs().max())
    )


@pytest.mark.usefixtures("cpu_architecture")
@folded
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 64), (96, 640), (40, 6208), (17, 100)])
def test_a_row_depends_on_no_other(outputs: int, inputs: int, in_float32: bool) -> None:
    """Nor on whether vectors or tiles multiply."""
    product, bias = packed(draw("normal", outputs, inputs)), draw("normal", outputs)
    x = draw("outliers", 70, inputs)
    whole = product.multiply(x, bias, in_float32=in_float32)
    for count in (1, 2, MANY - 1, MANY, 16, 17, 48):
        assert torch.equal(product.multiply(x[-count:], bias, in_float32=in_float32), whole[-count:])


@pytest.mark.usefixtures("cpu_architecture")
def test_outputs_that_no_cache_keeps() -> None:
    weight, x = draw("normal", 2048, 64), draw("normal", 513, 64)
    assert torch.equal(packed(weight).multiply(x), w8a8.multiply(x, weight).bfloat16())


@pytest.mark.usefixtures("cpu_architecture")
def test_signs_that_agree_everywhere_do_not_saturate() -> None:
    """Each pair of products is 2 * 127 * 127, and all sums are as large as they can be."""
    for inputs in (2, 64, 10_000, 66_304):
        x = torch.ones(5, inputs).bfloat16()
        for weight in (torch.ones(20, inputs).bfloat16(), -torch.ones(20, inputs).bfloat16()):
            assert torch.equal(packed(weight).multiply(x, in_float32=True), w8a8.multiply(x, weight))


@pytest.mark.usefixtures("cpu_architecture")
def test_no_pair_of_numbers_saturates_with_the_largest_weights() -> None:
    """Which pairs are multiplied in two parts is decided by their sums: here is each, in a row of its own."""
    numbers = torch.arange(-127, 128)
    x = torch.nn.functional.pad(torch.cartesian_prod(numbers, numbers), (0, 2)).bfloat16()
    x[:, 3] = 127  # so that a row's scale is 1
    for weight in (torch.ones(1, 4).bfloat16(), -torch.ones(1, 4).bfloat16()):
        assert torch.equal(packed(weight).multiply(x, in_float32=True), w8a8.multiply(x, weight))


@pytest.mark.usefixtures("cpu_architecture")
def test_nothing_beside_a_row_is_read_and_nothing_beside_the_outputs_is_written() -> None:
    for rows, outputs, inputs in ((1, 17, 33), (5, 16, 62), (13, 70, 64), (25, 40, 131), (49, 96, 192)):
        wide = torch.full((rows + 2, inputs + 40), torch.nan).bfloat16()
        x = wide[1:-1, 20:-20]
        x[:] = draw("normal", rows, inputs)
        weight, guarded = draw("normal", outputs, inputs), torch.full((2 + rows * outputs,), CANARY)
        out, product = guarded[1:-1], packed(weight)
        native = product.native()
        sides = x.data_ptr(), x.stride(0), rows, ctypes.addressof(native)
        load().kvlab_linear(*sides, out.data_ptr(), True, torch.get_num_threads())
        assert torch.equal(out.view(rows, outputs), w8a8.multiply(x, weight))
        assert guarded[0] == guarded[-1] == CANARY


@pytest.mark.usefixtures("cpu_architecture")
@pytest.mark.parametrize("inputs", [40, 64])
def test_a_row_that_is_not_finite_is_nan_and_no_other(inputs: int) -> None:
    weight, x = draw("normal", 20, inputs), draw("normal", 8, inputs)
    expected = w8a8.multiply(x, weight)
    x[2, 5], x[6, 0] = float("inf"), float("nan")
    found = packed(weight).multiply(x, in_float32=True)
    assert found.isnan().all(dim=1).nonzero().flatten().tolist() == [2, 6]
    others = [row for row in range(8) if row not in (2, 6)]
    assert torch.equal(found[others], expected[others])


@pytest.mark.usefixtures("cpu_architecture")
def test_no_rows_and_rows_of_the_weight_read_back() -> None:
    weight, ids = draw("normal", 70, 45), torch.randint(70, (20,))
    product = packed(weight)
    assert product.multiply(draw("normal", 0, 45)).shape == (0, 70)
    numbers, scales = w8a8.quantize(weight)
    assert torch.equal(product.rows(ids), (numbers.float() * scales[:, None]).bfloat16()[ids])


@pytest.mark.usefixtures("cpu_architecture")
@folded
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 5, 17, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (1056, 128), (60, 64), (64, 6208), (96, 40)])
def test_gates_are_those_of_the_product(rows: int, outputs: int, inputs: int, gelu: bool) -> None:
    """In tiles within it: what holds it where there are none stays as it is."""
    weight, bias, x = draw("normal", outputs, inputs), draw("normal", outputs), draw("normal", rows, inputs)
    product, out, wide = packed(weight), *(draw("normal", rows, size) for size in (outputs // 2, outputs))
    native, before, whole = product.native(bias), wide.clone(), product.multiply(x, bias)
    assert not load().kvlab_multiplies_in_tiles(ctypes.addressof(native))  # where x would be in tiles of bfloat16
    load().kvlab_linear_gated(
        *(x.data_ptr(), inputs, rows, ctypes.addressof(native), gelu),
        *(wide.data_ptr(), out.data_ptr(), False, torch.get_num_threads()),
    )
    assert torch.equal(out, gated(whole, gelu=gelu))
    assert torch.equal(wide, before if in_tiles(rows, inputs) and outputs % 32 == 0 else whole)


@pytest.mark.usefixtures("cpu_architecture")
@folded
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 60])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (1000, 128), (33, 100)])
def test_the_largest_without_the_others(rows: int, outputs: int, inputs: int) -> None:
    """Weights of few values: many outputs are equal, and the first of them is the largest."""
    weight, x = torch.randint(-1, 2, (outputs, inputs)).bfloat16(), torch.randint(-1, 2, (rows, inputs)).bfloat16()
    product = packed(weight)
    found = product.top1(x)
    assert (found is not None) == in_tiles(rows, inputs)
    if found is not None:
        values, indices = topk(product.multiply(x, in_float32=True), 1)
        assert torch.equal(found[0], values)
        assert torch.equal(found[1], indices)


@pytest.mark.usefixtures("cpu_architecture")
def test_takes_the_bytes_of_int8_and_refuses_sums_that_32_bits_do_not_hold() -> None:
    product = packed(draw("normal", 1024, 512))
    assert product.num_bytes == PackedWeight(draw("normal", 1024, 512), WeightFormat.INT8).num_bytes
    with pytest.raises(KernelError, match=r"66,312 inputs: .*no more than 66,311"):
        packed(torch.zeros(1, 66_312).bfloat16())


def test_the_instructions_are_named(cpu_architecture: str) -> None:
    expected = {"x86-64-v3": "avx2", "x86-64": "portable", "skylake-avx512": "avx512"}
    few, *many = int8_path().split(", ")
    if cpu_architecture in expected:
        assert (few, many) == (expected[cpu_architecture], [])
    else:
        assert few in ("avx512-vnni", "avx-vnni", instruction_set().split("-")[0])
        assert many == (["amx"] if paths().tiles else [])


@pytest.mark.usefixtures("cpu_architecture")
def test_tiles_are_left_out_with_those_of_bfloat16() -> None:
    if not paths().tiles:
        pytest.skip("products have no tiles here")
    product, x = packed(draw("normal", 70, 128)), draw("normal", 40, 128)
    in_tiles, library = product.multiply(x), load()
    take(library, Paths(False, paths().few, paths().many, {}))
    try:
        assert "amx" not in int8_path()
        assert product.top1(x) is None
        assert torch.equal(product.multiply(x), in_tiles)
    finally:
        take(library, paths())
