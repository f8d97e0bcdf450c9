"""Models in GGUF files against transformers' conversion of the same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvlab.attention.registry import select_backend
from kvlab.cli.capacity import CapacitySettings, configured, plans
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig, attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import decoder_config
from kvlab.models.gguf import read_gguf
from kvlab.models.weight_sources import open_weights
from tests.support.gguf_files import close, write_gguf
from tests.support.reference_models import MAX_POSITIONS, VARIANTS, logits_in_steps, make_model, random_texts

TOLERANCE = 5e-5
# As Llama 3.1 has it: GGUF keeps what frequencies are divided by, not the parameters of that.
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_LINEAR = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
_LINEAR |= {"full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}}
# Gemma 3 as it is published: every sixth layer sees all tokens.
_GEMMA = {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "sliding_window_pattern": 6}
#: A file of conf/model, and what is changed in its architecture.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_tiny", {"rope_parameters": _LLAMA3}),
    "llama with biases": ("llama_tiny", {"rope_parameters": _LLAMA3, "attention_bias": True}),
    "qwen2": ("qwen2_tiny", {}),
    "qwen3": ("qwen3_tiny", {}),
    "gemma3": ("gemma3_tiny", _GEMMA),
    "gemma3 linear rope": ("gemma3_tiny", {**_GEMMA, "rope_parameters": _LINEAR}),
}


def setting(path: Path) -> ModelConfig:
    return ModelConfig(name="file", family=None, path=str(path), weights=None, max_seq_len=MAX_POSITIONS)


def read(path: Path) -> Decoder:
    config = decoder_config(setting(path))
    specs = attention_specs(config, "float32", "cpu")
    weights = open_weights(str(path), torch.float32, "cpu")
    return Decoder(config, weights, select_backend(specs), specs, MAX_POSITIONS)


def converted(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that transformers makes of a file."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**load_gguf_checkpoint(path)["config"]))
    return load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]


def without_what_is_not_stored(config: DecoderConfig) -> DecoderConfig:
    """GGUF keeps one end of a sequence and 32-bit numbers."""
    return replace(config, rms_norm_eps=round(config.rms_norm_eps, 9), eos_token_ids=config.eos_token_ids[:1])


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_model_of_each_family(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, every tensor, and the logits of what was converted."""
    monkeypatch.setitem(VARIANTS, variant, FAMILIES[variant])
    model, path = make_model(variant, 0, tmp_path / "checkpoint"), tmp_path / "model.gguf"
    write_gguf(model.reference, path)
    found = decoder_config(setting(path))
    assert without_what_is_not_stored(found) == without_what_is_not_stored(model.config)
    weights = open_weights(str(path), torch.float32, "cpu")
    biases = {name: tensor for name, tensor in model.reference.state_dict().items() if name.endswith(".bias")}
    expected = converted(path) | biases  # which transformers reads for some families alone
    assert len(expected) >= 20
    for name, tensor in expected.items():
        assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor), name
    weights.finish()
    texts = random_texts(40, 150)
    logits = logits_in_steps(read(path), texts, [[len(text) for text in texts]])
    assert (
        max(float((ours - model.expected(ids)).abs().max()) for ours, ids in zip(logits, texts, strict=True))
        < TOLERANCE
    )


@pytest.mark.parametrize("stored", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_each_type_that_can_be_written(stored: str, tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny, path, stored)
    weights = open_weights(str(path), torch.float32, "cpu")
    for name, tensor in converted(path).items():
        assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor.float()), name


@pytest.mark.parametrize("stored", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_each_type_that_cannot(stored: str, tmp_path: Path) -> None:
    """Any bytes are blocks of such a type."""
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType[stored]
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (6, 512 // per_block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", blocks, raw_dtype=kind)
    close(writer)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(read_gguf(path).read("output.weight"), expected, equal_nan=True)
    assert expected.shape == (6, 512)


def test_the_planner_takes_a_file(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "own model.gguf"
    write_gguf(tiny, path, "Q8_0")
    settings = CapacitySettings(memory="256MiB")
    found = plans(settings, configured(settings, [f"model={path}", "executor.device=cpu"])[0])[""]
    assert (found.name, found.model.num_layers) == ("own model", tiny.config.num_hidden_layers)
    with pytest.raises(ConfigError, match=r"no model\.gguf: is not there"):
        plans(settings, configured(settings, [f"model={tmp_path}/no model.gguf"])[0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model("qwen3", 0, tmp_path_factory.mktemp("model")).reference
