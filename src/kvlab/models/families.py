"""Reads the options of a decoder from transformers' configuration classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig, RopeConfig

FAMILIES = ("llama", "qwen3")


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
    """Map a transformers configuration to kvlab's decoder. Raises ConfigError for what it cannot compute."""
    family = config.model_type
    if family not in FAMILIES:
        raise ConfigError("model_type", family, f"unknown family; known: {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise ConfigError("hidden_act", config.hidden_act, "only silu")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise ConfigError("attention_bias", True, "biases are not supported")
    if getattr(config, "use_sliding_window", False):
        raise ConfigError("use_sliding_window", True, "sliding windows are not supported")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    eos = config.eos_token_id
    return DecoderConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config.rope_parameters),
        qk_norm=family == "qwen3",
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _rope(parameters: dict[str, Any]) -> RopeConfig:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return RopeConfig(theta=parameters["rope_theta"])
    if kind != "llama3":
        raise ConfigError("rope_parameters.rope_type", kind, "unknown; known: default, llama3")
    return RopeConfig(
        theta=parameters["rope_theta"],
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position=parameters["original_max_position_embeddings"],
    )
