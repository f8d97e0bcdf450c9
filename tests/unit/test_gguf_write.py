"""Decoders written as GGUF files: what kvlab's reader finds in them, and what is not written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab.config import ModelConfig
from kvlab.errors import WeightsError
from kvlab.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvlab.models.families import decoder_config, read_config
from kvlab.models.gguf import read_gguf
from kvlab.models.gguf_write import STORED, misfit, tensor_shapes, write_gguf
from kvlab.models.weight_sources import open_weights
from kvlab.models.weights import DummyWeights, WeightSource

_SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3": {"model_type": "qwen3", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


def config_of(variant: str) -> DecoderConfig:
    return replace(read_config(_SIZES | VARIANTS[variant]), eos_token_ids=())


def dummy(dtype: torch.dtype = torch.float32) -> WeightSource:
    return DummyWeights(dtype, "cpu", 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_written_model_is_read_again(variant: str, tmp_path: Path) -> None:
    config, path = config_of(variant), tmp_path / "model.gguf"
    write_gguf(config, dummy(), path, "F32")
    model = ModelConfig(name="file", family=None, path=str(path), weights=None, max_seq_len=128)
    found = decoder_config(model)
    assert replace(found, rms_norm_eps=round(found.rms_norm_eps, 9)) == config
    written, drawn = open_weights(str(path), torch.float32, "cpu"), dummy()
    for name, shape in tensor_shapes(config).items():
        assert torch.equal(written.take(name, shape), drawn.take(name, shape)), name
    written.finish()


@pytest.mark.parametrize(("stored", "error"), [("F16", 1e-3), ("BF16", 0.0), ("Q8_0", 1e-2)])
def test_how_matrices_are_stored(stored: str, error: float, tmp_path: Path) -> None:
    config, path = config_of("qwen3"), tmp_path / "model.gguf"
    write_gguf(config, dummy(torch.bfloat16), path, stored)
    kinds = {tensor.type for tensor in read_gguf(path).tensors.values() if len(tensor.shape) > 1}
    assert kinds == {stored}
    written, drawn = open_weights(str(path), torch.float32, "cpu"), dummy(torch.bfloat16)
    for name, shape in tensor_shapes(config).items():
        exact = drawn.take(name, shape).float()
        assert (written.take(name, shape) - exact).abs().max() <= error * exact.abs().max()


def test_what_a_narrower_number_cannot_hold(tmp_path: Path) -> None:
    class Large(DummyWeights):
        def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.full(shape, 1e6)

    with pytest.raises(WeightsError, match=r"tensor model\.embed_tokens\.weight holds .* not finite"):
        write_gguf(config_of("qwen3"), Large(torch.float32, "cpu"), tmp_path / "model.gguf", "F16")


@pytest.mark.parametrize(
    ("variant", "changes", "stored", "said"),
    [
        ("qwen3", {"family": "gemma3_text"}, "F32", "is not written as GGUF; llama, qwen2, qwen3 are"),
        ("qwen2", {"layers": (LayerConfig(sliding_window=8),)}, "F32", "has sliding windows, which llama.cpp does"),
        ("llama", {"logit_soft_cap": 30.0}, "F32", "has soft caps"),
        ("llama", {"activation": "gelu_pytorch_tanh"}, "F32", "has the activation gelu_pytorch_tanh"),
        ("qwen3", {"output_bias": True}, "F32", "has biases of its attention"),
        (
            "qwen3",
            {"layers": (LayerConfig(RopeConfig(1e4, 8.0, original_max_position=8)),)},
            "F32",
            "has the rotary angles of Llama 3.1",
        ),
        ("qwen3", {"intermediate_size": 48}, "Q8_0", "has rows that are not whole blocks of 32"),
    ],
)
def test_what_is_not_written(variant: str, changes: dict[str, Any], stored: str, said: str) -> None:
    config = config_of(variant)
    assert [misfit(config, kind) for kind in STORED] == [None] * len(STORED)
    assert str(misfit(replace(config, **changes), stored)).startswith(said)
