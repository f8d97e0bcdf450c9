"""What kvlab reads from a configuration, and that it is what transformers reads from it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError
from kvlab.models import hub
from kvlab.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvlab.models.families import DEFAULTS, decoder_config, read_config

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def through_transformers(family: str, values: dict[str, Any]) -> DecoderConfig:
    """What transformers makes of the values, with nothing left out."""
    return read_config(AutoConfig.for_model(family, **json.loads(json.dumps(values))).to_dict())


def read(family: str, **changes: Any) -> DecoderConfig:
    values = SHAPE | changes
    config = read_config({**values, "model_type": family})
    assert config == through_transformers(family, values)
    return config


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


class TestOptions:
    def test_of_llama(self) -> None:
        config = read("llama")
        assert (config.qkv_bias, config.output_bias, config.qk_norm, config.sandwich_norms) == (False,) * 4
        assert config.layers == (LayerConfig(RopeConfig(10_000.0)),) * 4
        assert (config.activation, config.head_dim, config.attention_scale) == ("silu", 16, 0.25)

    def test_of_qwen2(self) -> None:
        config = read("qwen2")
        assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)

    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    def test_attention_bias_is_on_all_four_projections(self, family: str) -> None:
        config = read(family, attention_bias=True)
        assert (config.qkv_bias, config.output_bias) == (True, True)

    def test_of_qwen3(self) -> None:
        config = read("qwen3", head_dim=32)
        assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 32)

    def test_of_gemma3(self) -> None:
        config = read("gemma3_text", head_dim=32, query_pre_attn_scalar=16, sliding_window=8)
        assert config.qk_norm
        assert config.norm_offset
        assert config.sandwich_norms
        assert (config.activation, config.attention_scale, config.embedding_scale) == ("gelu_pytorch_tanh", 0.25, 8)
        assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)

    def test_soft_caps_of_gemma3(self) -> None:
        config = read("gemma3_text", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)

    def test_the_language_model_of_a_multimodal_gemma3(self) -> None:
        text = {**SHAPE, "head_dim": 16, "sliding_window": 8}
        values = {"text_config": text, "eos_token_id": [1, 106]}
        whole = read_config({**values, "model_type": "gemma3"})
        assert whole == read("gemma3_text", head_dim=16, sliding_window=8, eos_token_id=[1, 106])
        assert whole == through_transformers("gemma3", values)


class TestLayers:
    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_windows_of_qwen_begin_at_max_window_layers(self, family: str) -> None:
        config = read(family, use_sliding_window=True, sliding_window=8, max_window_layers=3)
        assert windows(config) == [None, None, None, 8]

    def test_a_window_that_is_not_used(self) -> None:
        assert windows(read("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=0)) == [None] * 4

    def test_gemma3_has_a_window_and_rotary_angles_for_each_kind(self) -> None:
        scaling = {"rope_type": "linear", "factor": 8.0}  # as its published files have it
        config = read("gemma3_text", sliding_window=8, sliding_window_pattern=2, rope_scaling=scaling)
        near, far = LayerConfig(RopeConfig(10_000.0), 8), LayerConfig(RopeConfig(1_000_000.0, factor=8.0))
        assert config.layers == (near, far, near, far)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GIVEN: dict[str, list[Any]] = {
    "hidden_size": [64, 128],
    "head_dim": [16, 24],
    "num_hidden_layers": [3, 7],
    "max_position_embeddings": [512],
    "rms_norm_eps": [1e-5],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True],
    "use_sliding_window": [True, False],
    "sliding_window": [16],
    "max_window_layers": [0, 2],
    "sliding_window_pattern": [2, 3],
    "query_pre_attn_scalar": [9],
    "rope_theta": [500_000.0],
    "rope_local_base_freq": [5_000.0],
    "rope_scaling": [None, {"type": "linear", "factor": 2.0}, _LLAMA3],
    "eos_token_id": [7, [7, 9]],
}
_HEADS = st.sampled_from([{}, {"num_attention_heads": 8, "num_key_value_heads": 2}])
_SOME = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in _GIVEN.items()})
ANY_VALUES = st.builds(lambda heads, values: heads | values, _HEADS, _SOME)


class TestAsTransformersReadsIt:
    @pytest.mark.parametrize("family", DEFAULTS)
    def test_every_default(self, family: str) -> None:
        reference = type(AutoConfig.for_model(family))
        fields = {name: field.default for name, field in reference.__dataclass_fields__.items()}
        assert {key: fields[key] for key in DEFAULTS[family]} == DEFAULTS[family]

    @pytest.mark.parametrize("family", DEFAULTS)
    def test_a_file_without_values(self, family: str) -> None:
        assert read_config({"model_type": family}) == through_transformers(family, {})

    def test_a_multimodal_file_without_values(self) -> None:
        assert read_config({"model_type": "gemma3"}) == through_transformers("gemma3", {})

    @pytest.mark.parametrize("family", DEFAULTS)
    @given(values=ANY_VALUES)
    @settings(max_examples=20)
    def test_any_values(self, family: str, values: dict[str, Any]) -> None:
        """Some keys given, others left out."""
        if family == "qwen2":
            values.pop("attention_bias", None)  # which its own class does not know
        assert read_config({**values, "model_type": family}) == through_transformers(family, values)

    @pytest.mark.parametrize("family", DEFAULTS)
    def test_the_file_it_writes(self, family: str, tmp_path: Path) -> None:
        AutoConfig.for_model(family, **SHAPE).save_pretrained(tmp_path)
        model = ModelConfig("checkpoint", family=None, path=str(tmp_path), weights="dummy", max_seq_len=16)
        assert decoder_config(model) == read(family)


@pytest.mark.parametrize(
    ("family", "changes", "key", "advice"),
    [
        ("mistral", {}, "model_type=mistral", "known: gemma3, gemma3_text, llama, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu", "known: silu, gelu_pytorch_tanh"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation=relu", "known: silu, gelu_pytorch_tanh"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True", "only false"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True", "only false"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3", "num_attention_heads=4"),
        ("llama", {"num_attention_heads": 6}, "num_attention_heads=6", "hidden_size=64"),
        ("llama", {"hidden_size": 0}, "hidden_size=0", "at least 1"),
        ("llama", {"vocab_size": "many"}, "vocab_size=many", "whole number"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps=null", "number above 0"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings=no", "true or false"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types=chunked_attention", "sliding_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window=null", "give a number of tokens"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=['full_attention']", "num_hidden_layers=4"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type=yarn",
            "known: default, linear, llama3, or model.implementation=transformers",
        ),
        (
            "gemma3_text",
            {
                "sliding_window_pattern": 2,
                "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
            },
            "rope_parameters.full_attention.rope_type=dynamic",
            "known: default, linear, llama3",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5", "only 1.0"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_parameters.factor=null", "rope_type=linear needs"),
    ],
)
def test_what_cannot_be_computed_is_refused(family: str, changes: dict[str, Any], key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config({**SHAPE, **changes, "model_type": family})
    assert str(refused.value).startswith(f"{key}: ")
    assert advice in str(refused.value)


def test_an_unknown_hub_id_says_how_to_point_at_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, file: str) -> None:
        raise OSError(f"cannot reach the hub for {repository}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(hub, "no_address", lambda: None)
    with pytest.raises(ConfigError, match=r"model\.path=some/model: .* give a directory that holds config\.json"):
        decoder_config(ModelConfig("checkpoint", family=None, path="some/model"))


def test_a_hub_whose_name_is_not_known_is_not_called_but_for_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, port: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def kept(repository: str, file: str, *, local_files_only: bool = False) -> str:
        if repository == "own/kept" and local_files_only:
            return "config.json"
        raise OSError("nothing of it is kept")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", kept)
    assert hub.hub_file("own/kept", "config.json") == Path("config.json")
    with pytest.raises(hub.HubError, match=r"^[a-z.]+: Name or service not known$"):
        hub.hub_file("own/other", "config.json")


@pytest.mark.parametrize("where", ["/nowhere", "./nowhere", "nowhere", "/dev/null", "/" + "x" * 5000, "/a\0b"])
def test_what_is_no_directory_says_so(where: str) -> None:
    with pytest.raises(ConfigError, match="is not the path of a directory"):
        decoder_config(ModelConfig("checkpoint", family=None, path=where))


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "no config.json"), ("{", "is no JSON that can be read"), ("[]", "holds no JSON object")],
)
def test_a_directory_without_a_configuration_says_so(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        decoder_config(ModelConfig("checkpoint", family=None, path=str(tmp_path)))
    assert str(refused.value).startswith(f"model.path={tmp_path}: ")
