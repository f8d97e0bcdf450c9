"""What transformers' models need is planned without memory; what kvlab cannot serve is refused by name."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvlab.config import KVConfig, ModelConfig
from kvlab.engine.build import plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.errors import ConfigError, KvlabError
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.families import decoder_config
from tests.support.transformers_models import FAMILIES, SIZES, UNLIKE, engine_config, write_model


def described(family: str, implementation: str = "auto", **changes: Any) -> DecoderConfig:
    architecture = SIZES | (FAMILIES | UNLIKE).get(family, {}) | changes
    return decoder_config(ModelConfig("tiny", family, architecture, implementation=implementation, max_seq_len=64))


HEAD_DIM = {"mistral": 16, "phi3": 16, "gemma2": 32, "deepseek_v3": 16 + 8, "qwen3_moe": 16, "gpt_oss": 16}


class TestPlan:
    @pytest.mark.parametrize("family", [*FAMILIES, *UNLIKE])
    def test_is_that_of_the_model(self, family: str, tmp_path: Path) -> None:
        """Its shapes, and the weights that are loaded. Heads are not named alike, or not at all, in each family."""
        written = write_model(family, tmp_path)
        plan = plan_engine(engine_config(tmp_path, KVConfig(num_blocks=8)))
        model, kv_heads = plan.model, 2 if family not in ("gpt_neox", "deepseek_v3") else 4
        assert (model.num_layers, model.num_heads, model.num_kv_heads) == (3, 4, kv_heads)
        assert plan.pool.bytes_per_token == 2 * 3 * kv_heads * HEAD_DIM.get(family, 48 // 4) * 4
        stored = {tensor.data_ptr(): tensor.numel() for tensor in written.reference.state_dict().values()}
        assert plan.weights.stored == model.num_parameters == sum(stored.values())
        loaded: Any = build_decoder(plan)
        held = {tensor.data_ptr(): tensor.nbytes for tensor in loaded._model.state_dict().values()}
        assert plan.weights.parameters == sum(held.values())
        assert model.tie_word_embeddings == written.reference.config.tie_word_embeddings

    def test_has_the_windows_of_layers(self) -> None:
        assert [layer.sliding_window for layer in described("gemma2").layers] == [12, None, 12]
        assert [layer.sliding_window for layer in described("mistral").layers] == [16] * 3
        assert [layer.sliding_window for layer in described("granite").layers] == [None] * 3

    def test_has_scales_and_caps(self) -> None:
        gemma, granite = described("gemma2"), described("granite")
        assert (gemma.attention_scale, gemma.attention_soft_cap) == (20**-0.5, 3.0)
        assert (granite.attention_scale, granite.attention_soft_cap) == (0.2, None)

    def test_angles_that_change_with_a_batch_are_served_up_to_where_they_change(self) -> None:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        with pytest.raises(ConfigError, match=r"model.max_seq_len=64: .* up to 40"):
            described("phi3", rope_parameters=rope, partial_rotary_factor=1.0, original_max_position_embeddings=40)

    def test_takes_no_memory_and_little_time(self) -> None:
        """70 billion parameters."""
        shape = {"hidden_size": 8192, "intermediate_size": 28_672, "vocab_size": 128_256, "num_hidden_layers": 80}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
        changes: dict[str, Any] = shape | heads
        model = described("mistral", **changes)
        assert 70e9 < model.num_parameters < 71e9
        assert model.kv_spec("bfloat16").bytes_per_token == 2 * 80 * 8 * 128 * 2


class TestImplementation:
    def test_auto_takes_kvlabs_decoder_where_it_knows_the_family(self) -> None:
        assert type(described("llama")) is DecoderConfig
        assert type(described("llama", "transformers")) is TransformersConfig
        assert type(described("mistral")) is TransformersConfig

    def test_kvlabs_own_is_never_replaced(self) -> None:
        with pytest.raises(ConfigError, match=r"model.family=mistral: unknown family; known: gemma3, .*qwen3$"):
            described("mistral", "kvlab")

    def test_an_unknown_one_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="known: auto, kvlab, transformers"):
            described("llama", "vllm")


_LAST_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bart", {}, "has an encoder"),
        ("t5", {"num_layers": 2}, "has an encoder"),
        ("bert", {"is_decoder": True, "pad_token_id": 0}, "has an encoder, or is one"),
        ("bert", {"pad_token_id": 0}, "asks of the attention of layer 0 .*: attention to later tokens"),
        ("vit", {}, "transformers has no causal language model of this family"),
        ("mamba", {}, r"has layers \(linear_attention\) with a state"),
        ("rwkv", {"attention_hidden_size": 48}, "has layers with a state"),
        ("lfm2", _CONV, r"has layers \(conv\) with a state"),
        ("llama4_text", {}, r"has layers \(chunked_attention\) with a state or a mask"),
        ("bloom", {}, "never calls transformers' attention interface"),
        ("gemma4_text", {"layer_types": _LAST_FULL}, "layers 0 and 2 differ in heads, scale or cap"),
        ("diffllama", {}, "calls attention 6 times in 3 layers"),
        ("mistral", {"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ("mistral", {"hidden_size": "many"}, "transformers takes no such values"),
        ("mistral", {"num_attention_heads": 0}, "transformers takes no such values"),
        ("mistral", {"hidden_act": "os.system"}, "transformers takes no such values"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"model.family={family}: {reason}"):
        described(family, "transformers", **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: has to be at most 1024"),
        ({"eos_token_id": 150}, "eos_token_id=150: has to be null, or token ids of the vocabulary, 0 to 149"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        described("mistral", **changes)


def test_a_multimodal_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.family=gemma3: has more parts than a language model"):
        decoder_config(ModelConfig("tiny", "gemma3", implementation="transformers"))


def test_int8_weights_are_kvlabs_own(tmp_path: Path) -> None:
    config = engine_config(write_model("mistral", tmp_path).directory, KVConfig())
    config.executor.weights = "int8"
    with pytest.raises(ConfigError, match=r"executor.weights=int8: .* transformers runs mistral; use executor"):
        plan_engine(config)


_ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**20,
    float("nan"),
    "text",
    "",
    [],
    [1, 2],
    {},
    {"a": {}},
    "../x",
    "__class__",
]


def test_odd_values_are_taken_or_refused_in_a_sentence() -> None:
    """For every key that transformers' class has, and some that it has not: never another error."""
    draw = random.Random(0)
    known = AutoConfig.for_model("mistral", **SIZES).to_dict()
    keys = [*known, "_attn_implementation", "attn_implementation", "auto_map", "forward", "get_text_config"]
    for key in keys:
        for value in draw.sample(_ODD, 4):
            values = {**SIZES, key: value}
            values.pop("model_type", None)
            with suppress(KvlabError):
                decoder_config(ModelConfig("tiny", "mistral", values, max_seq_len=8))
    assert torch.get_default_dtype() == torch.float32
