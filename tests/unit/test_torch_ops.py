from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvlab.models.ops import select_ops
from kvlab.models.ops.base import Norm
from kvlab.models.ops.torch_ops import TorchOps

OPS = TorchOps()


class TestLinear:
    @pytest.mark.parametrize("rows", [1, 2, 7, 33])
    @pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (7, 13), (1, 1), (33, 257), (200, 64)])
    def test_bfloat16_agrees_with_torch(self, rows: int, out_features: int, in_features: int) -> None:
        """Packed for oneDNN where the processor computes in bfloat16; the result is the same."""
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).bfloat16()
        x = torch.randn(rows, in_features).bfloat16()
        expected = functional.linear(x.float(), weight.float())
        y = OPS.linear(weight)(x)
        assert (y.dtype, y.shape) == (torch.bfloat16, expected.shape)
        torch.testing.assert_close(y.float(), expected, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("rows", [1, 7])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_bias_is_added_to_each_row(self, rows: int, dtype: torch.dtype) -> None:
        weight, bias, x = (
            (torch.randn(33, 64) / 8).to(dtype),
            torch.randn(33).to(dtype),
            torch.randn(rows, 64).to(dtype),
        )
        expected = functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(OPS.linear(weight, bias)(x).float(), expected, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_float32_is_torchs_own(self, rows: int) -> None:
        weight, x = torch.randn(7, 13), torch.randn(rows, 13)
        assert torch.equal(OPS.linear(weight)(x), functional.linear(x, weight))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_no_rows_give_no_rows(self, dtype: torch.dtype) -> None:
        y = OPS.linear(torch.randn(7, 13).to(dtype))(torch.empty(0, 13, dtype=dtype))
        assert (y.shape, y.dtype) == ((0, 7), dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_picked_from_a_batch_give_what_they_give_alone(self, dtype: torch.dtype) -> None:
        linear = OPS.linear((torch.randn(16, 32) * 0.1).to(dtype))
        x = torch.randn(9, 64).to(dtype)[:, ::2]  # not contiguous
        picked = linear(x[torch.tensor([8, 0, 3])])
        expected = torch.cat([linear(x[row : row + 1].contiguous()) for row in (8, 0, 3)])
        torch.testing.assert_close(picked, expected, atol=1e-2, rtol=1e-2)

    def test_the_weight_given_is_left_as_it_was(self) -> None:
        weight = torch.randn(16, 32).bfloat16()
        before = weight.clone()
        OPS.linear(weight)(torch.randn(3, 32).bfloat16())
        assert torch.equal(weight, before)


class TestRMSNorm:
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
    def test_is_the_formula_computed_in_double(self, dtype: torch.dtype, tolerance: float, scale: float) -> None:
        x, weight = (torch.randn(5, 3, 64) * scale).to(dtype), (1 + 0.5 * torch.randn(64)).to(dtype)
        mean_square = x.double().square().mean(-1, keepdim=True)
        expected = x.double() / (mean_square + 1e-6).sqrt() * weight.double()
        y = OPS.norm(x, Norm(weight, 1e-6))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_weight_in_float32_keeps_its_digits(self, dtype: torch.dtype) -> None:
        """1 + 2^-10 is 1 in bfloat16: over many rows the difference shows."""
        x, weight = torch.randn(4000, 8).to(dtype), torch.full((8,), 2**-10, dtype=dtype)
        plain = x.double() / x.double().pow(2).mean(-1, keepdim=True).sqrt()
        y = OPS.norm(x, Norm(1.0 + weight.float(), 1e-6))
        assert y.dtype == dtype
        ratio = (y.double() * plain).sum() / plain.pow(2).sum()
        assert float(ratio) == pytest.approx(1 + 2**-10, abs=2**-13)

    def test_eps_bounds_a_row_of_zeros(self) -> None:
        assert torch.equal(OPS.norm(torch.zeros(2, 8), Norm(torch.ones(8), 1e-6)), torch.zeros(2, 8))

    def test_rows_do_not_touch_each_other(self) -> None:
        norm, x = Norm(torch.rand(8), 1e-6), torch.randn(4, 8)
        assert torch.equal(OPS.norm(x, norm), torch.cat([OPS.norm(row[None], norm) for row in x]))


class TestLookup:
    def test_rows_are_those_of_the_weight(self) -> None:
        weight = torch.randn(16, 8).bfloat16()
        assert torch.equal(OPS.linear(weight, lookup=True).rows(torch.tensor([3, 0, 3])), weight[[3, 0, 3]])

    def test_a_weight_not_made_for_it_refuses(self) -> None:
        with pytest.raises(RuntimeError, match="made without `lookup`"):
            OPS.linear(torch.randn(16, 8)).rows(torch.tensor([0]))


class TestSelection:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_kernels_where_there_are_some(self, dtype: torch.dtype) -> None:
        assert select_ops(dtype, "cpu").name.startswith(("native (", "torch"))  # without a compiler: torch
        assert select_ops(dtype, "cpu", kernels=False).name == "torch"

    def test_float16_is_pytorchs(self) -> None:
        assert select_ops(torch.float16, "cpu").name == "torch"

    def test_without_a_compiler_pytorch_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert select_ops(torch.bfloat16, "cpu").name == "torch"
