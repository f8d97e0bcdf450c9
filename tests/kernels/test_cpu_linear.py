"""The native matrix product against the same in double precision, built for three instruction sets."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvlab.kernels.cpu.elementwise import gated, topk
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import instruction_set, load
from kvlab.kv.formats import quantize
from kvlab.models.ops.cpu_ops import CpuOps
from tests.kernels.grids import folded
from tests.kernels.tiled_rows import put_in_tiles, take_from_tiles

pytestmark = pytest.mark.usefixtures("cpu_architecture")

IN_TILES = -1  # see tiles.hpp
AWKWARD = [(1, 1), (17, 33), (64, 1023), (1000, 64), (1000, 1000)]


DTYPES = (torch.bfloat16, torch.float32)
#: Products that round nothing but their outputs; the others have a file of their own (test_cpu_int8.py).
FORMATS = (WeightFormat.PLAIN, WeightFormat.INT8, WeightFormat.COMPACT)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Up to one rounding to bfloat16, or the sums' roundings in float32."""
    assert found.dtype == dtype
    error = 4e-3 if dtype == torch.bfloat16 else 2e-6
    tolerance = error * max(1e-30, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=error)


def in_tiles(inputs: int) -> bool:
    """Whether products of so many inputs go through matrix tiles."""
    return "amx" in instruction_set() and inputs % 32 == 0


def _available(format: WeightFormat) -> WeightFormat:
    """The format, or PLAIN where this processor's kernels have no such weights."""
    return format if load().kvlab_packed_linear_bytes(1, 32, format, 2) else WeightFormat.PLAIN


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 19, 24, 25, 49, 100])
@pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
def test_any_shape(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias, x = (draw(*shape, dtype=dtype) for shape in ((outputs, inputs), (outputs,), (rows, inputs)))
    packed = PackedWeight(weight)
    exact = x.double() @ weight.double().T
    assert_close(packed.multiply(x), exact, dtype)
    assert_close(packed.multiply(x, bias), exact + bias.double(), dtype)


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 48, 49, 65, 129, 600])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 64), (33, 352), (90, 96), (270, 2080), (70, 6208)])
def test_shapes_of_matrix_tiles(rows: int, outputs: int, inputs: int, format: WeightFormat) -> None:
    weight, bias, x = draw(outputs, inputs), draw(outputs), draw(rows, inputs)
    packed = PackedWeight(weight, format)
    exact = x.double() @ (dequantized(weight) if format is WeightFormat.INT8 else weight.double()).T
    assert_close(packed.multiply(x), exact)
    assert_close(packed.multiply(x, bias), exact + bias.double())


def test_rows_that_are_all_one() -> None:
    weight, x = draw(20, 64), draw(1, 64)
    packed = PackedWeight(weight)
    assert torch.equal(packed.multiply(x.expand(3, 64)), packed.multiply(x).expand(3, 20))
    assert torch.equal(packed.multiply(x[0].expand(1, 64)), packed.multiply(x))


def test_outputs_that_no_cache_keeps() -> None:
    weight, x = draw(2048, 64), draw(513, 64)
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T)


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 48, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (96, 32), (1056, 96), (60, 64), (64, 33), (96, 6208)])
def test_gates_inside_the_product(rows: int, outputs: int, inputs: int, gelu: bool, format: WeightFormat) -> None:
    """To the last bit what two passes give."""
    packed, bias, x = PackedWeight(draw(outputs, inputs), format), draw(outputs), draw(rows, inputs)
    product, out, wide = packed.native(bias), draw(rows, outputs // 2), draw(rows, outputs)
    before = wide.clone()
    load().kvlab_linear_gated(
        *(x.data_ptr(), inputs, rows, ctypes.addressof(product), gelu),
        *(wide.data_ptr(), out.data_ptr(), False, torch.get_num_threads()),
    )
    assert torch.equal(out, gated(packed.multiply(x, bias), gelu=gelu))
    assert torch.equal(wide, before) == (in_tiles(inputs) and outputs % 32 == 0)


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 64), (192, 32), (2048, 96), (128, 6208)])
def test_rows_that_come_and_go_in_tiles(rows: int, outputs: int, inputs: int, format: WeightFormat) -> None:
    """What lies beyond the last row is of no matter."""
    if not in_tiles(inputs):
        pytest.skip("products have no tiles here")
    packed, bias, x = PackedWeight(draw(outputs, inputs), format), draw(outputs), draw(rows, inputs)
    product, tiles, out = packed.native(bias), put_in_tiles(x), draw(rows, outputs)
    weight, threads, library = ctypes.addressof(product), torch.get_num_threads(), load()
    assert library.kvlab_multiplies_in_tiles(weight)
    library.kvlab_linear(tiles.data_ptr(), IN_TILES, rows, weight, out.data_ptr(), False, threads)
    whole = packed.multiply(x, bias)
    assert torch.equal(out, whole)
    gate = put_in_tiles(draw(rows, outputs // 2))
    pointers = None, gate.data_ptr()
    library.kvlab_linear_gated(tiles.data_ptr(), IN_TILES, rows, weight, False, *pointers, True, threads)
    assert torch.equal(take_from_tiles(gate, rows), gated(whole, gelu=False))


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 48, 60])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 64), (1000, 96), (4000, 32), (300, 33)])
def test_the_largest_without_the_others(rows: int, outputs: int, inputs: int, format: WeightFormat) -> None:
    """Small whole numbers: many outputs are equal, and the first of them is the largest."""
    weight, bias, x = (
        torch.randint(-2, 3, shape).bfloat16() for shape in [(outputs, inputs), (outputs,), (rows, inputs)]
    )
    packed = PackedWeight(weight, format)
    ops = CpuOps(weights=_available(format).name.lower())
    found = ops.linear_top1(ops.linear(weight, bias), x)
    assert packed.top1(x) is not None
    expected = topk(packed.multiply(x, bias, in_float32=True), 1)
    assert torch.equal(found.values, expected[0])
    assert torch.equal(found.indices, expected[1])


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 17, 60])
@pytest.mark.parametrize(("outputs", "inputs"), [(17, 64), (4000, 96), (32_768, 32), (300, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_in_float32_are_those_that_are_rounded(
    biased: bool, rows: int, outputs: int, inputs: int, format: WeightFormat
) -> None:
    packed, bias, x = (
        PackedWeight(draw(outputs, inputs), format),
        draw(outputs) if biased else None,
        draw(rows, inputs),
    )
    found = packed.multiply(x, bias, in_float32=True)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert torch.equal(found.bfloat16(), packed.multiply(x, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_of_what_is_no_number(dtype: torch.dtype) -> None:
    weight, x = draw(100, 32, dtype=dtype), draw(3, 32, dtype=dtype)
    x[1, 4], weight[60, 5] = float("nan"), float("inf")
    x[:, 5] = torch.tensor([1.0, 1.0, -1.0])
    ops = CpuOps(dtype=dtype)
    found = ops.linear_top1(ops.linear(weight), x)
    assert PackedWeight(weight).top1(x) is not None
    assert found.values.flatten()[:2].isnan().tolist() == [False, True]
    assert found.values[0, 0] == float("inf")
    assert found.indices.flatten()[:2].tolist() == [60, 0]
    assert found.values[2, 0].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    found = PackedWeight(draw(20, 10, dtype=dtype)).multiply(draw(0, 10, dtype=dtype))
    assert (found.shape, found.dtype) == ((0, 20), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary(dtype: torch.dtype) -> None:
    weight, x = draw(151_936, 32, dtype=dtype), draw(13, 32, dtype=dtype)
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T, dtype)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_x_inside_a_wider_tensor(dtype: torch.dtype) -> None:
    weight, wide = draw(40, 20, dtype=dtype), draw(5, 50, dtype=dtype)
    x = wide[:, 10:30]
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T, dtype)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_x_apart(dtype: torch.dtype) -> None:
    weight, x = draw(40, 20, dtype=dtype), draw(20, 5, dtype=dtype).T
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T, dtype)


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "rows"), [(90, 60), (96, 60), (352, 600), (6208, 600)])
def test_a_row_depends_on_no_other(inputs: int, rows: int, dtype: torch.dtype) -> None:
    """Neither on its place nor on how many there are, to the last bit."""
    packed, x = PackedWeight(draw(70, inputs, dtype=dtype)), draw(rows, inputs, dtype=dtype)
    together = packed.multiply(x)
    for row in range(0, rows, 1 + rows // 60):
        assert torch.equal(packed.multiply(x[row : row + 1]), together[row : row + 1])


@folded
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
def test_rows_of_the_weight_read_back(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = draw(outputs, inputs, dtype=dtype)
    ids = torch.randint(outputs, (20,))
    assert torch.equal(PackedWeight(weight).rows(ids), weight[ids])


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """What int8 leaves of a weight, exactly."""
    numbers, scales = quantize(weight)
    return numbers.double() * scales.double()[:, None]


class TestInt8:
    @folded
    @pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 13, 16, 19, 24, 25, 49])
    @pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
    def test_any_shape(self, rows: int, outputs: int, inputs: int) -> None:
        weight, bias, x = draw(outputs, inputs), draw(outputs), draw(rows, inputs)
        packed = PackedWeight(weight, WeightFormat.INT8)
        if rows:
            exact = x.double() @ dequantized(weight).T
            assert_close(packed.multiply(x), exact)
            assert_close(packed.multiply(x, bias), exact + bias.double())
        assert packed.multiply(x).shape == (rows, outputs)

    def test_a_vocabulary(self) -> None:
        weight, x = draw(151_936, 32), draw(13, 32)
        assert_close(PackedWeight(weight, WeightFormat.INT8).multiply(x), x.double() @ dequantized(weight).T)

    def test_is_near_the_weight_as_it_was(self) -> None:
        weight, x = draw(300, 1000), draw(13, 1000)
        error = PackedWeight(weight, WeightFormat.INT8).multiply(x).double() - x.double() @ weight.double().T
        assert error.norm() < 0.015 * (x.double() @ weight.double().T).norm()

    def test_zeros_and_an_output_that_is_not_finite(self) -> None:
        weight, x = draw(20, 40), draw(3, 40)
        weight[3], weight[5, 7] = 0.0, float("inf")
        found = PackedWeight(weight, WeightFormat.INT8).multiply(x)
        assert not found[:, 3].any()
        assert (~found.isfinite()).any(dim=0).nonzero().flatten().tolist() == [5]

    @folded
    @pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
    def test_rows_of_the_weight_read_back(self, outputs: int, inputs: int) -> None:
        weight = draw(outputs, inputs)
        ids = torch.randint(outputs, (20,))
        found = PackedWeight(weight, WeightFormat.INT8).rows(ids).double()
        scale = weight[ids].double().abs().amax(dim=1, keepdim=True) / 127
        # Half a step, and the rounding to bfloat16. (What lies halfway may be rounded either way.)
        assert ((found - weight[ids].double()).abs() <= 0.501 * scale + 4e-3 * found.abs()).all()

    def test_takes_half_the_bytes(self) -> None:
        assert PackedWeight(draw(1024, 512), WeightFormat.INT8).num_bytes == 1024 * (512 + 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_the_bytes_of_the_weight_and_little_more(dtype: torch.dtype) -> None:
    assert PackedWeight(draw(1024, 512, dtype=dtype)).num_bytes == 1024 * 512 * dtype.itemsize
    assert PackedWeight(draw(1000, 511, dtype=dtype)).num_bytes <= 1008 * 512 * dtype.itemsize


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_behind_a_product_in_float32(gelu: bool) -> None:
    """Also where bfloat16 has tiles."""
    weight, bias, x = (draw(*shape, dtype=torch.float32) for shape in ((96, 64), (96,), (17, 64)))
    packed, out, wide = PackedWeight(weight), torch.empty(17, 48), torch.empty(17, 96)
    product = packed.native(bias)
    load().kvlab_linear_gated(
        *(x.data_ptr(), 64, 17, ctypes.addressof(product), gelu),
        *(wide.data_ptr(), out.data_ptr(), False, torch.get_num_threads()),
    )
    assert torch.equal(wide, packed.multiply(x, bias))
    assert torch.equal(out, gated(wide, gelu=gelu))


def test_a_weight_in_float32_keeps_its_precision() -> None:
    assert PackedWeight(draw(16, 32, dtype=torch.float32), WeightFormat.INT8).format is WeightFormat.PLAIN


class TestCompact:
    """Exponents in four bits. To the last bit what products with the plain weight give."""

    @folded
    @pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 33, 48, 49, 100])
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (90, 96), (270, 2080), (70, 6208)])
    def test_is_exact(self, rows: int, outputs: int, inputs: int) -> None:
        weight, x = draw(outputs, inputs), draw(rows, inputs)
        scattered(weight)
        plain, compact = PackedWeight(weight), PackedWeight(weight, WeightFormat.COMPACT)
        assert compact.format is _available(WeightFormat.COMPACT)
        assert torch.equal(compact.multiply(x), plain.multiply(x))
        ids = torch.randint(outputs, (20,))
        assert torch.equal(compact.rows(ids), weight[ids])

    def test_every_bit_pattern_is_kept(self) -> None:
        """NaN, infinities, numbers below the smallest normal one, and both zeros."""
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
        for start in range(0, 2**16, 2**10):  # no more exponents at once than there are codes
            weight = every[start : start + 2**10].view(16, 64).view(torch.bfloat16)
            packed = PackedWeight(weight, WeightFormat.COMPACT)
            assert packed.format is _available(WeightFormat.COMPACT)
            assert torch.equal(packed.rows(torch.arange(16)).view(torch.int16), weight.view(torch.int16))

    def test_exponents_that_vary_too_much_stay_as_they_are(self) -> None:
        weight = torch.randint(0, 2**15, (40, 256), dtype=torch.int16).view(torch.bfloat16)
        packed = PackedWeight(weight, WeightFormat.COMPACT)
        assert packed.format is WeightFormat.PLAIN
        ids = torch.arange(40)
        assert torch.equal(packed.rows(ids).view(torch.int16), weight.view(torch.int16))

    def test_takes_three_quarters_of_the_memory(self) -> None:
        packed = PackedWeight(draw(1024, 512), WeightFormat.COMPACT)
        if packed.format is WeightFormat.COMPACT:
            assert 0.75 < packed.num_bytes / (1024 * 512 * 2) < 0.76


def scattered(weight: torch.Tensor) -> None:
    """Give a few weights of `weight` exponents that no other has."""
    for index in range(0, weight.numel(), weight.numel() // 3):
        weight.view(-1)[index] = 2.0 ** (-40 - index % 50)
    weight.view(-1)[-1] = -1e-39
