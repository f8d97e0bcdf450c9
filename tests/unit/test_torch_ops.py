from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional

from kvlab.models.ops import select_ops, torch_ops
from kvlab.models.ops.base import Norm
from kvlab.models.ops.torch_ops import TorchOps
from tests.support.processors import as_on_a_processor

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


class TestBfloat16OnEitherProcessor:
    """With instructions for bfloat16, and without."""

    @pytest.fixture(autouse=True, params=[True, False], ids=["packs", "packs not"])
    def packs(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
        packs: bool = request.param
        as_on_a_processor(monkeypatch, packs=packs)
        monkeypatch.setattr(torch_ops, "PART_BYTES", 4 * 3 * 70)  # several parts, the last smaller
        return packs

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("rows", [0, 1, 7, 600])
    @pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (7, 13), (1, 1), (33, 257), (64, 3)])
    def test_a_product_is_that_in_float32_rounded_once(
        self, rows: int, out_features: int, in_features: int, biased: bool, packs: bool
    ) -> None:
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).bfloat16()
        x, bias = torch.randn(rows, in_features).bfloat16(), torch.randn(out_features).bfloat16()
        expected = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
        y = OPS.linear(weight, bias if biased else None)(x)
        assert (y.dtype, y.shape) == (torch.bfloat16, expected.shape)
        # Half the last of 8 bits, and what sums in float32 are off by.
        assert torch.all((y.double() - expected).abs() <= expected.abs() * 2**-8 * 1.001 + 1e-5)

    def test_a_bias_is_added_before_the_product_is_rounded(self) -> None:
        """1 + 2^-8 is halfway to the next number, where it would be rounded to 1; 2^-8 and 2^-9 more are not."""
        weight, x = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.ones(1, 2).bfloat16()
        assert OPS.linear(weight, torch.tensor([2.0**-9]).bfloat16())(x).item() == 1 + 2**-7

    def test_rows_are_those_of_the_weight(self) -> None:
        weight = torch.randn(16, 8).bfloat16()
        assert torch.equal(OPS.linear(weight, lookup=True).rows(torch.tensor([3, 0, 3])), weight[[3, 0, 3]])

    def test_little_is_in_float32_at_once(self, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_ops, "PART_BYTES", 2**16)
        linear, x = OPS.linear(torch.randn(4096, 256).bfloat16()), torch.randn(8, 256).bfloat16()
        sizes = sizes_of_tensors(partial(linear, x))
        assert len(sizes) >= (1 if packs else 64)
        assert packs or max(sizes) <= 2**16  # y itself has 64 KiB

    def test_one_row_s_part_is_a_row_of_the_weight_at_least(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_ops, "PART_BYTES", 1)
        weight, x = torch.eye(3).bfloat16(), torch.randn(2, 3).bfloat16()
        assert torch.equal(OPS.linear(weight)(x), x)


def sizes_of_tensors(call: Callable[[], object]) -> list[int]:
    """Bytes of each tensor that a call makes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        call()
    events = traced.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


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
