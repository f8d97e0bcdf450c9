from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvlab.models.config import RopeConfig
from kvlab.models.rope import RotaryEmbedding, inverse_frequencies, rotate

LLAMA = RopeConfig(
    theta=500_000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


def rotate_complex(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Channel i and i + head_dim / 2 of `[T, heads, head_dim]` are one complex number, turned by its angle."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), torch.outer(positions.double(), frequencies))
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns[:, None, :]
    return torch.cat([turned.real, turned.imag], dim=-1)


@given(
    head_dim=st.sampled_from([2, 16, 64, 80, 128]),
    positions=st.lists(st.integers(0, 299), min_size=1, max_size=6),
    theta=st.sampled_from([100.0, 10_000.0, 1_000_000.0]),
)
def test_rotation_is_that_of_complex_numbers(head_dim: int, positions: list[int], theta: float) -> None:
    rotary = RotaryEmbedding(RopeConfig(theta), head_dim, 300, torch.float32)
    x, at = torch.randn(len(positions), 3, head_dim), torch.tensor(positions)
    expected = rotate_complex(x, at, theta).float()
    torch.testing.assert_close(rotate(x, *rotary.tables.at(at)), expected, atol=2e-4, rtol=0)


def test_position_0_is_left_as_it_is() -> None:
    rotary = RotaryEmbedding(RopeConfig(10_000.0), 16, 4, torch.float32)
    x = torch.randn(2, 3, 16)
    assert torch.equal(rotate(x, *rotary.tables.at(torch.zeros(2, dtype=torch.int64))), x)


@given(shift=st.integers(0, 200))
def test_products_depend_on_the_distance_alone(shift: int) -> None:
    rotary = RotaryEmbedding(RopeConfig(10_000.0), 64, 300, torch.float32)
    q, k = torch.randn(2, 1, 1, 64)
    near = rotate(q, *rotary.tables.at(torch.tensor([20]))) * rotate(k, *rotary.tables.at(torch.tensor([3])))
    far = rotate(q, *rotary.tables.at(torch.tensor([20 + shift]))) * rotate(
        k, *rotary.tables.at(torch.tensor([3 + shift]))
    )
    torch.testing.assert_close(near.sum(), far.sum(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(RopeConfig(10_000.0), 16, 8, dtype)
    assert rotate(torch.randn(1, 2, 16, dtype=dtype), *rotary.tables.at(torch.tensor([3]))).dtype == dtype


class TestFrequencies:
    def test_fall_from_1_by_powers_of_theta(self) -> None:
        found = inverse_frequencies(RopeConfig(10_000.0), 8)
        torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001]))

    def test_scaling_keeps_short_wavelengths_and_stretches_long_ones(self) -> None:
        plain, scaled = inverse_frequencies(RopeConfig(500_000.0), 128), inverse_frequencies(LLAMA, 128)
        wavelength = 2 * math.pi / plain
        short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
        assert short.any()
        assert long.any()
        torch.testing.assert_close(scaled[short], plain[short])
        torch.testing.assert_close(scaled[long], plain[long] / 32)
        between = ~short & ~long
        assert between.any()
        assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 32)).all()

    def test_linear_scaling_stretches_all_wavelengths_alike(self) -> None:
        plain = inverse_frequencies(RopeConfig(10_000.0), 64)
        torch.testing.assert_close(inverse_frequencies(RopeConfig(10_000.0, factor=8.0), 64), plain / 8)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_scaling_is_that_of_transformers(self, head_dim: int) -> None:
        parameters = {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = AutoConfig.for_model("llama", head_dim=head_dim, rope_parameters=parameters)
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        torch.testing.assert_close(inverse_frequencies(LLAMA, head_dim), expected)
