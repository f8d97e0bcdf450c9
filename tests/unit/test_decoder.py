from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import src.run
from kvlab.attention.registry import default_registry
from kvlab.config import ModelConfig
from kvlab.kv.contiguous import SlottedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.families import decoder_config
from kvlab.models.rope import RotaryEmbedding
from kvlab.models.weights import DummyWeights

FAMILIES = ["llama_tiny", "qwen2_tiny", "qwen3_tiny", "gemma3_tiny"]


def dummy_decoder(name: str, dtype: str = "float32") -> Decoder:
    """A model of conf/model with dummy weights."""
    file: Any = OmegaConf.load(Path(src.run.ROOT) / "conf" / "model" / f"{name}.yaml")
    config = decoder_config(ModelConfig(**OmegaConf.to_container(file)))
    weights = DummyWeights(getattr(torch, dtype), "cpu", norm_weight=config.initial_norm_weight)
    specs = attention_specs(config, dtype, "cpu")
    return Decoder(config, weights, default_registry().select(specs), specs, 128)


def last_logits(decoder: Decoder, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    pool = SlottedKVCachePool(1, 128, KVStorage(decoder.config.kv_spec(dtype), 1, 128))
    view = pool.view([pool.allocate_slot()], [len(ids)])
    return decoder.forward(torch.tensor(ids), view, torch.tensor([len(ids) - 1]))[0].float()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_give_logits_that_depend_on_the_whole_prompt(name: str, dtype: str) -> None:
    decoder = dummy_decoder(name, dtype)
    logits = last_logits(decoder, [*range(40)], dtype)
    other = last_logits(decoder, [99, *range(1, 40)], dtype)
    assert 0.3 < logits.std() < 3
    assert (logits - other).abs().max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_angles_are_computed_once_for_each_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = dummy_decoder(name)
    angles, calls = RotaryEmbedding.angles, []

    def counted(self: RotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(self)
        return angles(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "angles", counted)
    last_logits(decoder, [1, 2, 3])
    assert len(calls) == len(set(calls)) == (2 if name == "gemma3_tiny" else 1)


def test_each_layer_asks_for_its_own_attention() -> None:
    specs = attention_specs(dummy_decoder("gemma3_tiny").config, "bfloat16", "cpu")
    assert [spec.sliding_window for spec in specs] == [32, 32, None]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in specs} == {(4, 1, 32, 0.25)}
