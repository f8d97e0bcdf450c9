"""Reads the options of a decoder from a model's configuration: the values of a config.json.

Keys and defaults are those of transformers' configuration classes, for the families that the decoder computes.
transformers itself is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvlab.models.ops.torch_ops import ACTIVATIONS

_DEFAULT_ROWS: dict[str, tuple[Any, Any, Any, Any]] = {  # llama, qwen2, qwen3, gemma3_text
    "vocab_size": (32_000, 151_936, 151_936, 262_208),
    "hidden_size": (4096, 4096, 4096, 2304),
    "intermediate_size": (11_008, 22_016, 22_016, 9216),
    "num_hidden_layers": (32, 32, 32, 26),
    "num_attention_heads": (32, 32, 32, 8),
    "num_key_value_heads": (None, 32, 32, 4),
    "head_dim": (None, None, 128, 256),
    "max_position_embeddings": (2048, 32_768, 32_768, 131_072),
    "rms_norm_eps": (1e-6, 1e-6, 1e-6, 1e-6),
    "tie_word_embeddings": (False, False, False, True),
    "hidden_act": ("silu", "silu", "silu", None),
    "hidden_activation": (None, None, None, "gelu_pytorch_tanh"),
    "query_pre_attn_scalar": (None, None, None, 256),
    "sliding_window": (None, 4096, 4096, 4096),
    "max_window_layers": (None, 28, 28, None),
    "eos_token_id": (2, None, None, 1),
}

#: What a configuration of each family has where it leaves a key out. A key that is not here is null or false.
DEFAULTS: dict[str, dict[str, Any]] = {
    family: {key: row[column] for key, row in _DEFAULT_ROWS.items() if row[column] is not None}
    for column, family in enumerate(("llama", "qwen2", "qwen3", "gemma3_text"))
}

#: The options of DecoderConfig that a family fixes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3_text": {"qk_norm": True, "norm_offset": True, "sandwich_norms": True},
}

#: Values of `model_type`. `gemma3` is multimodal: its `text_config` is a gemma3_text.
FAMILIES = tuple(sorted([*DEFAULTS, "gemma3"]))

_ROPE_KEYS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
#: What each type of rotary angles needs, in the order of RopeConfig's fields.
_ROPE_TYPES = {"default": _ROPE_KEYS[:1], "linear": _ROPE_KEYS[:2], "llama3": _ROPE_KEYS}
_THETA = 10_000.0  # of a model that names none; full attention of Gemma 3:
_GEMMA_THETA = 1_000_000.0
_GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees all tokens


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The decoder that a model setting describes.

    Raises ConfigError for a family that kvlab does not know, values that no decoder can have, or a `model.path`
    without a readable config.json.
    """
    config = read_config(_values_of(model))
    if model.max_seq_len > config.max_position_embeddings:
        reason = f"{model.name} has positions up to {config.max_position_embeddings}"
        raise ConfigError("model.max_seq_len", model.max_seq_len, reason)
    return config


def _values_of(model: ModelConfig) -> Mapping[str, Any]:
    """The configuration in `model.path`, else `model.architecture`."""
    if model.path is None:
        if model.family not in FAMILIES:
            raise ConfigError("model.family", model.family, f"unknown; known: {', '.join(FAMILIES)}")
        return {**model.architecture, "model_type": model.family}
    path = os.path.expanduser(model.path)
    file = Path(path) / "config.json"
    if not file.is_file():
        if path.startswith(("/", "./", "../")) or Path(path).exists():
            raise ConfigError("model.path", model.path, "there is no config.json in this directory")
        file = _download(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", model.path, f"{file} is no JSON that can be read ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError("model.path", model.path, f"{file} is no model's configuration")
    return values


def _download(repository: str) -> Path:
    """The config.json of a hub id, downloaded once."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # the hub's client raises many kinds: offline, no such id, bad name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = "give a directory that holds config.json, or the id of a hub this machine can reach"
        reason = f"no model configuration there ({reason}); {advice}"
        raise ConfigError("model.path", repository, reason) from error


class _Values:
    """Values by key, with the family's defaults behind them. Raises ConfigError for a value of another type."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self.gemma = family == "gemma3_text"
        self._values = {**DEFAULTS[family], **values}

    def __call__(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A number of something, at least 1; `default`, where there is one, for null."""
        value = default if self(key) is None else self(key)
        if not _is_positive(value) or not isinstance(value, int):
            raise ConfigError(key, value, "has to be a whole number of at least 1")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value: float = self(key)
        if not _is_positive(value):
            raise ConfigError(key, value, "has to be a number above 0")
        return value

    def flag(self, key: str) -> bool:
        """True or false; null and what is left out is false."""
        value = self(key)
        if not isinstance(value, bool | None):
            raise ConfigError(key, value, "has to be true or false")
        return bool(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that the values of a config.json describe. Raises ConfigError for what cannot be computed.

    Of a multimodal model (`gemma3`) the language model is taken, and served without images.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError("model_type", family, f"unknown family; known: {', '.join(FAMILIES)}")
    if family == "gemma3":
        family, eos, config = "gemma3_text", config.get("eos_token_id"), config.get("text_config") or {}
        config = config if eos is None else {**config, "eos_token_id": eos}
    values = _Values(family, config)
    activation_key = "hidden_activation" if values.gemma else "hidden_act"
    if values(activation_key) not in ACTIVATIONS:
        raise ConfigError(activation_key, values(activation_key), f"unknown; known: {', '.join(ACTIVATIONS)}")
    if values.flag("mlp_bias"):
        raise ConfigError("mlp_bias", True, "the feed-forward has no biases; only false")
    if values.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention", True, "a decoder attends to what is before; only false")
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = values.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    if values("head_dim") is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"does not divide hidden_size={hidden}; give head_dim")
    head_dim = values.count("head_dim", default=hidden // heads)
    bias, eos = values.flag("attention_bias"), values("eos_token_id")
    options = {"qkv_bias": bias, "output_bias": bias, **_OPTIONS[family]}
    return DecoderConfig(
        family=family,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size"),
        layers=_layers(values),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=(values.number("query_pre_attn_scalar") if values.gemma else head_dim) ** -0.5,
        rms_norm_eps=values.number("rms_norm_eps"),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        activation=values(activation_key),
        embedding_scale=hidden**0.5 if values.gemma else None,
        # transformers 5 leaves this cap of Gemma 3 out; published checkpoints have none.
        attention_soft_cap=values("attn_logit_softcapping"),
        logit_soft_cap=values("final_logit_softcapping"),
        **options,
    )


def _layers(values: _Values) -> tuple[LayerConfig, ...]:
    count, kinds = values.count("num_hidden_layers"), values("layer_types")
    window = values("sliding_window") if values.gemma or values.flag("use_sliding_window") else None
    if kinds is None:
        if values.gemma:
            every = values.count("sliding_window_pattern", default=_GEMMA_PATTERN)
            full = range(every - 1, count, every)
        else:
            full = range(count if window is None else values("max_window_layers"))
        kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(count)]
    if len(kinds) != count:
        raise ConfigError("layer_types", kinds, f"names {len(kinds)} layers of num_hidden_layers={count}")
    layers = {kind: _layer(values, kind, window) for kind in dict.fromkeys(kinds)}
    return tuple(layers[kind] for kind in kinds)


def _layer(values: _Values, kind: str, window: Any) -> LayerConfig:
    if kind == "full_attention":
        return LayerConfig(_rope(values, kind))
    if kind != "sliding_attention":
        raise ConfigError("layer_types", kind, "unknown; known: full_attention, sliding_attention")
    if not isinstance(window, int) or window < 1:
        raise ConfigError("sliding_window", window, "layer_types has sliding layers: give a number of tokens")
    return LayerConfig(_rope(values, kind), window)


def _rope(values: _Values, kind: str) -> RopeConfig:
    """The rotary angles of a kind of layer. Published files have `rope_theta` and `rope_scaling`; those that
    transformers 5 wrote have both in `rope_parameters`, with a set for each kind of layer where they differ.
    """
    scaling, parameters = values("rope_scaling") or {}, values("rope_parameters") or {}
    key, theta_key, theta = "rope_parameters", "rope_theta", _THETA
    if values.gemma:
        key, parameters = f"{key}.{kind}", parameters.get(kind) or {"rope_type": "default"}
        if kind == "full_attention":
            parameters, theta = {**parameters, **scaling}, _GEMMA_THETA
        else:
            theta_key = "rope_local_base_freq"
    else:
        parameters = scaling or parameters
        if any(isinstance(value, dict) for value in parameters.values()):
            key, parameters = f"{key}.{kind}", parameters.get(kind)
            if parameters is None:
                raise ConfigError(key, None, "needs at least rope_theta")
    parameters = {
        "rope_type": parameters.get("type", "default"),
        "rope_theta": theta if values(theta_key) is None else values(theta_key),
        "partial_rotary_factor": values("partial_rotary_factor"),
        "original_max_position_embeddings": values("max_position_embeddings"),
        **parameters,
    }
    rope_type, partial = parameters["rope_type"], parameters["partial_rotary_factor"]
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"{key}.rope_type", rope_type, f"unknown; known: {', '.join(_ROPE_TYPES)}")
    if partial not in (None, 1.0):
        raise ConfigError(f"{key}.partial_rotary_factor", partial, "whole heads are rotated; only 1.0")
    numbers: list[Any] = [parameters.get(name) for name in _ROPE_TYPES[rope_type]]
    for name, number in zip(_ROPE_KEYS, numbers, strict=False):
        if not _is_positive(number):
            raise ConfigError(f"{key}.{name}", number, f"rope_type={rope_type} needs a number above 0")
    return RopeConfig(*numbers)
