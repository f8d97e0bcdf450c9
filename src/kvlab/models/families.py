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

_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}

#: What a configuration of each family has where it leaves a key out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "eos_token_id": 1,
    },
}

#: Values of `model_type`. `gemma3` is multimodal: its `text_config` is a gemma3_text.
FAMILIES = tuple(sorted([*DEFAULTS, "gemma3"]))

_ORIGINAL = "original_max_position_embeddings"
#: What each type of rotary angles needs.
_ROPE_TYPES = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}
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
        raise ConfigError(
            "model.max_seq_len",
            model.max_seq_len,
            f"{model.name} has positions up to {config.max_position_embeddings}",
        )
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
        raise ConfigError(
            "model.path",
            repository,
            f"no model configuration there ({reason}); give a directory that holds config.json, or the id of a hub "
            "this machine can reach",
        ) from error


class _Values:
    """Values by key, with the family's defaults behind them. Raises ConfigError for a value of another type."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self._values = {**DEFAULTS[family], **values}

    def __call__(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str) -> int:
        """A number of something, at least 1."""
        value = self(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(key, value, "has to be a whole number of at least 1")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigError(key, value, "has to be a number above 0")
        return value

    def flag(self, key: str) -> bool:
        """True or false; null and what is left out is false."""
        value = self(key)
        if not isinstance(value, bool | None):
            raise ConfigError(key, value, "has to be true or false")
        return bool(value)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that the values of a config.json describe. Raises ConfigError for what cannot be computed.

    Of a multimodal model (`gemma3`) the language model is taken, and served without images.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError("model_type", family, f"unknown family; known: {', '.join(FAMILIES)}")
    if family == "gemma3":
        whole, family, config = config, "gemma3_text", config.get("text_config") or {}
        if whole.get("eos_token_id") is not None:
            config = {**config, "eos_token_id": whole["eos_token_id"]}
    values, gemma = _Values(family, config), family == "gemma3_text"
    activation_key = "hidden_activation" if gemma else "hidden_act"
    if values(activation_key) not in ACTIVATIONS:
        raise ConfigError(activation_key, values(activation_key), f"unknown; known: {', '.join(ACTIVATIONS)}")
    if values.flag("mlp_bias"):
        raise ConfigError("mlp_bias", True, "the feed-forward has no biases; only false")
    if values.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention", True, "a decoder attends to what is before; only false")
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = heads if values("num_key_value_heads") is None else values.count("num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    if values("head_dim") is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"does not divide hidden_size={hidden}; give head_dim")
    head_dim = hidden // heads if values("head_dim") is None else values.count("head_dim")
    attention_bias, eos = values.flag("attention_bias"), values("eos_token_id")
    return DecoderConfig(
        family=family,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size"),
        layers=_layers(values, gemma=gemma),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=(values.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        rms_norm_eps=values.number("rms_norm_eps"),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        activation=values(activation_key),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        qk_norm=gemma or family == "qwen3",
        norm_offset=gemma,
        sandwich_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else None,
        # transformers 5 leaves this cap of Gemma 3 out; published checkpoints have none.
        attention_soft_cap=values("attn_logit_softcapping"),
        logit_soft_cap=values("final_logit_softcapping"),
    )


def _layers(values: _Values, *, gemma: bool) -> tuple[LayerConfig, ...]:
    count = values.count("num_hidden_layers")
    window = _window(values, gemma=gemma)
    kinds = values("layer_types")
    if kinds is None:
        if gemma:
            every = values.count("sliding_window_pattern") if values("sliding_window_pattern") else _GEMMA_PATTERN
            sliding = [(index + 1) % every != 0 for index in range(count)]
        else:
            first = values("max_window_layers") if window is not None else count
            sliding = [index >= first for index in range(count)]
        kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if len(kinds) != count:
        raise ConfigError("layer_types", kinds, f"names {len(kinds)} layers of num_hidden_layers={count}")
    ropes = {kind: _rope(values, kind, gemma=gemma) for kind in dict.fromkeys(kinds)}
    return tuple(LayerConfig(ropes[kind], window if kind == "sliding_attention" else None) for kind in kinds)


def _window(values: _Values, *, gemma: bool) -> Any:
    """What sliding layers see, in tokens; None: there are none."""
    return values("sliding_window") if gemma or values.flag("use_sliding_window") else None


def _rope(values: _Values, kind: str, *, gemma: bool) -> RopeConfig:
    """The rotary angles of a kind of layer. Published files have `rope_theta` and `rope_scaling`; those that
    transformers 5 wrote have both in `rope_parameters`, with a set for each kind of layer where they differ.
    """
    if kind not in ("full_attention", "sliding_attention"):
        raise ConfigError("layer_types", kind, "unknown; known: full_attention, sliding_attention")
    if kind == "sliding_attention":
        window = _window(values, gemma=gemma)
        if not isinstance(window, int) or window < 1:
            raise ConfigError("sliding_window", window, "layer_types has sliding layers: give a number of tokens")
    scaling, parameters = values("rope_scaling"), values("rope_parameters") or {}
    key, theta_key, theta = "rope_parameters", "rope_theta", _THETA
    if gemma:
        key = f"{key}.{kind}"
        parameters = {**(parameters.get(kind) or {"rope_type": "default"})}
        if kind == "full_attention":
            parameters |= scaling or {}
            theta = _GEMMA_THETA
        else:
            theta_key = "rope_local_base_freq"
    else:
        parameters = scaling or parameters
        if any(isinstance(value, dict) for value in parameters.values()):
            key, parameters = f"{key}.{kind}", parameters.get(kind)
            if parameters is None:
                raise ConfigError(key, None, "needs at least rope_theta")
    defaults = {
        "rope_type": parameters.get("type", "default"),
        "rope_theta": theta if values(theta_key) is None else values(theta_key),
        "partial_rotary_factor": values("partial_rotary_factor"),
        _ORIGINAL: values("max_position_embeddings"),
    }
    return _rope_of(key, {**defaults, **parameters})


def _rope_of(key: str, parameters: Mapping[str, Any]) -> RopeConfig:
    kind, partial = parameters["rope_type"], parameters["partial_rotary_factor"]
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{key}.rope_type", kind, f"unknown; known: {', '.join(_ROPE_TYPES)}")
    if partial not in (None, 1.0):
        raise ConfigError(f"{key}.partial_rotary_factor", partial, "whole heads are rotated; only 1.0")
    for name in _ROPE_TYPES[kind]:
        value = parameters.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{key}.{name}", value, f"rope_type={kind} needs a number above 0")
    if kind == "default":
        return RopeConfig(parameters["rope_theta"])
    if kind == "linear":
        return RopeConfig(parameters["rope_theta"], factor=parameters["factor"])
    return RopeConfig(
        parameters["rope_theta"],
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position=parameters[_ORIGINAL],
    )
