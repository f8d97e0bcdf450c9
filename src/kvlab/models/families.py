"""Reads the options of a decoder from transformers' configuration classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvlab.models.ops.torch_ops import ACTIVATIONS

FAMILIES = ("gemma3", "gemma3_text", "llama", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3")


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The decoder that a model setting describes.

    Raises ConfigError for a family kvlab does not know, an architecture that transformers refuses, or a
    `model.path` without a readable config.json.
    """
    config = from_transformers(load_transformers_config(model))
    if model.max_seq_len > config.max_position_embeddings:
        raise ConfigError(
            "model.max_seq_len",
            model.max_seq_len,
            f"{model.name} has positions up to {config.max_position_embeddings}",
        )
    return config


def load_transformers_config(model: ModelConfig) -> Any:
    """transformers' configuration: from `model.path`, else from `model.family` and `model.architecture`."""
    from transformers import AutoConfig

    if model.path is not None:
        path = os.path.expanduser(model.path)
        looks_local = path.startswith(("/", "./", "../")) or Path(path).exists()
        if looks_local and not (Path(path) / "config.json").is_file():
            raise ConfigError("model.path", model.path, "there is no config.json in this directory")
        try:
            return AutoConfig.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                "model.path",
                model.path,
                f"no model configuration there ({reason}); give a directory that holds config.json, or the "
                "id of a hub this machine can reach",
            ) from error
    if model.family not in FAMILIES:
        raise ConfigError("model.family", model.family, f"unknown; known: {', '.join(FAMILIES)}")
    try:
        return AutoConfig.for_model(model.family, **model.architecture)
    except Exception as error:  # its own checks raise several kinds
        reason = " ".join(str(error).split())
        raise ConfigError("model.architecture", dict(model.architecture), reason) from error


def from_transformers(config: Any) -> DecoderConfig:
    """Map a transformers configuration to kvlab's decoder. Raises ConfigError for what it cannot compute.

    Of a multimodal one (`gemma3`) the language model is taken, and served without images.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError("model_type", config.model_type, f"unknown family; known: {', '.join(FAMILIES)}")
    eos = getattr(config, "eos_token_id", None)
    if config.model_type == "gemma3":
        config = config.text_config
        eos = config.eos_token_id if eos is None else eos
    family = config.model_type
    gemma = family == "gemma3_text"
    activation_key = "hidden_activation" if gemma else "hidden_act"
    activation = getattr(config, activation_key)
    if activation not in ACTIVATIONS:
        raise ConfigError(activation_key, activation, f"unknown; known: {', '.join(ACTIVATIONS)}")
    if getattr(config, "mlp_bias", False):
        raise ConfigError("mlp_bias", True, "the feed-forward has no biases; only false")
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError("use_bidirectional_attention", True, "a decoder attends to what is before; only false")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention_bias = getattr(config, "attention_bias", False)
    return DecoderConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=_layers(config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        activation=activation,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        qk_norm=gemma or family == "qwen3",
        norm_offset=gemma,
        sandwich_norms=gemma,
        embedding_scale=config.hidden_size**0.5 if gemma else None,
        # transformers 5 leaves this cap of Gemma 3 out; published checkpoints have none.
        attention_soft_cap=getattr(config, "attn_logit_softcapping", None),
        logit_soft_cap=getattr(config, "final_logit_softcapping", None),
    )


def _layers(config: Any) -> tuple[LayerConfig, ...]:
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if len(kinds) != count:
        raise ConfigError("layer_types", kinds, f"names {len(kinds)} layers of num_hidden_layers={count}")
    return tuple(_layer(config, kind) for kind in kinds)


def _layer(config: Any, kind: str) -> LayerConfig:
    window = None
    if kind == "sliding_attention":
        window = config.sliding_window
        if window is None or window < 1:
            raise ConfigError("sliding_window", window, "layer_types has sliding layers: give a number of tokens")
    elif kind != "full_attention":
        raise ConfigError("layer_types", kind, "unknown; known: full_attention, sliding_attention")
    key, rope = "rope_parameters", config.rope_parameters
    if any(isinstance(value, dict) for value in rope.values()):  # one set for each kind of layer
        key, rope = f"{key}.{kind}", rope.get(kind)
    return LayerConfig(_rope(key, rope), window)


def _rope(key: str, parameters: dict[str, Any] | None) -> RopeConfig:
    if parameters is None:
        raise ConfigError(key, None, "needs at least rope_theta")
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{key}.rope_type", kind, f"unknown; known: {', '.join(_ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ConfigError(f"{key}.partial_rotary_factor", partial, "whole heads are rotated; only 1.0")
    theta = parameters["rope_theta"]
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, factor=parameters["factor"])
    return RopeConfig(
        theta,
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position=parameters["original_max_position_embeddings"],
    )
