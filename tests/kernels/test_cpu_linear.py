"""The native matrix product against the same in double precision, built for three instruction sets."""

from __future__ import annotations

import pytest
import torch

from kvlab.kernels.cpu.linear import PackedWeight

pytestmark = pytest.mark.usefixtures("cpu_architecture")

AWKWARD = [(1, 1), (17, 33), (64, 1023), (1000, 64), (1000, 1000)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to one rounding to bfloat16."""
    assert found.dtype == torch.bfloat16
    tolerance = 4e-3 * max(1e-30, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=4e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 12, 13, 16, 19, 24, 25, 49, 100])
@pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
def test_any_shape(rows: int, outputs: int, inputs: int) -> None:
    weight, bias, x = draw(outputs, inputs), draw(outputs), draw(rows, inputs)
    packed = PackedWeight(weight)
    exact = x.double() @ weight.double().T
    assert_close(packed.multiply(x), exact)
    assert_close(packed.multiply(x, bias), exact + bias.double())


def test_no_rows() -> None:
    assert PackedWeight(draw(20, 10)).multiply(draw(0, 10)).shape == (0, 20)


def test_a_vocabulary() -> None:
    weight, x = draw(151_936, 32), draw(13, 32)
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T)


def test_rows_of_x_inside_a_wider_tensor() -> None:
    weight, wide = draw(40, 20), draw(5, 50)
    x = wide[:, 10:30]
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T)


def test_columns_of_x_apart() -> None:
    weight, x = draw(40, 20), draw(20, 5).T
    assert_close(PackedWeight(weight).multiply(x), x.double() @ weight.double().T)


def test_a_row_depends_on_no_other() -> None:
    """Neither on its place nor on how many there are, to the last bit."""
    packed, x = PackedWeight(draw(70, 90)), draw(60, 90)
    together = packed.multiply(x)
    for row in range(len(x)):
        assert torch.equal(packed.multiply(x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(("outputs", "inputs"), AWKWARD)
def test_rows_of_the_weight_read_back(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs)
    ids = torch.randint(outputs, (20,))
    assert torch.equal(PackedWeight(weight).rows(ids), weight[ids])


def test_takes_the_bytes_of_the_weight_and_little_more() -> None:
    assert PackedWeight(draw(1024, 512)).num_bytes == 1024 * 512 * 2
    assert PackedWeight(draw(1000, 511)).num_bytes <= 1008 * 512 * 2
