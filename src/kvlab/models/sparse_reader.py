"""Reads what kvlab.models.sparse describes from the values of a config.json."""

from collections.abc import Mapping
from typing import Any

from kvlab.errors import ConfigError
from kvlab.models.checkpoint_format import checkpoint_format
from kvlab.models.config import LayerConfig, eos_token_ids
from kvlab.models.linear import Linear, language_model, layer_kinds, read_linear
from kvlab.models.mamba import Mamba2
from kvlab.models.nemotron import read_nemotron
from kvlab.models.sparse import Experts, Latent, SparseConfig
from kvlab.models.values import Family, Values

_LATENT = ("deepseek_v3", "kimi_k2")
_DENSE = ("qwen3_5", "qwen3_5_text")
_LINEAR = (*_DENSE, "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_MAMBA = "nemotron_h"
#: Families some layers of which have a state, and what these have, in words.
STATES = {**dict.fromkeys(_LINEAR, Linear.called), _MAMBA: Mamba2.called}
SPARSE = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe", *_LATENT, *STATES)  # values of model_type
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # as families name them
_FAMILY = Family({"tie_word_embeddings": False, "decoder_sparse_step": 1, "first_k_dense_replace": 0})


def read_sparse(config: Mapping[str, Any]) -> SparseConfig:
    """The model that the values of a config.json of one of `SPARSE` describe, on one device. Raises ConfigError for
    values that it cannot have.
    """
    family, values = str(config["model_type"]), Values(_FAMILY, language_model(config))
    if family == _MAMBA:
        return read_nemotron(values)
    counts = (values.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    layers, hidden, heads = counts
    latent, is_glm = _latent(values) if family in _LATENT else None, family == "glm4_moe"
    kv_heads = heads if latent else values.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    head_dim = latent.nope + latent.rope if latent else values.count("head_dim", default=hidden // heads)
    linear = read_linear(values) if family in _LINEAR else None
    turned = int(head_dim * (_rotary_share(values) or 0.5)) if is_glm or linear else head_dim
    vocab_size, q, kv = values.count("vocab_size"), heads * head_dim, kv_heads * head_dim
    head_norms = 2 * head_dim if linear else {"qwen3_moe": 2 * head_dim, "minimax_m2": q + kv}.get(family, 0)
    if is_glm and values.flag("use_qk_norm"):
        head_norms = 2 * head_dim
    if latent:
        head_norms = (latent.query_rank or 0) + latent.rank
    biases = q + 2 * kv + (0 if is_glm else hidden) if values.flag("attention_bias") else 0
    if biases and latent:
        raise ConfigError("attention_bias", True, "latent attention has no biases here; only false")
    kinds = _layers(values, family, layers)
    own = sum(not layer.has_state for layer in kinds)
    gates = layers * hidden if linear and family not in _DENSE else 0  # of shared experts: a number for each token
    return SparseConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size", default=1 if linear else None),  # 1: all are mixtures
        layers=kinds,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=eos_token_ids(values("eos_token_id"), vocab_size),
        qk_norm=bool(head_norms) and not latent,
        experts=_experts(values, family, layers),
        latent=latent,
        quantization=checkpoint_format(values),
        norm_numbers=layers * 2 * hidden + own * head_norms + hidden + gates,
        bias_numbers=layers * (biases + (heads if family == "gpt_oss" else 0)),
        rotary_dim=latent.rope if latent else values.count("rotary_dim", default=turned),
        states=linear,
        has_gate=linear is not None,
    )


def _rotary_share(values: Values) -> float | None:
    """The share of a head's numbers that are turned, where it is given."""
    key, inner = "partial_rotary_factor", values("rope_parameters")
    of_angles = isinstance(inner, Mapping) and inner.get(key) is not None
    return (Values(values.family, inner) if of_angles else values).optional_number(key)


def _experts(values: Values, family: str, layers: int) -> Experts:
    if family in _DENSE:
        size = values.count("intermediate_size")
        return Experts(1, 1, size, 0, layers=0, has_biases=False, has_correction=False)
    key = next((key for key in _COUNTS if values(key) is not None), _COUNTS[0])
    count = values.count(key)
    active = values.count("num_experts_per_tok", most=count)
    own = family in ("glm4_moe", "qwen3_moe", *_LATENT, *_LINEAR)
    size = values.count("moe_intermediate_size" if own else "intermediate_size")
    shared = values.count("n_shared_experts", default=0, least=0) * size
    if family in _LINEAR:
        shared = values.count("shared_expert_intermediate_size", default=0, least=0)
    step, first = values.count("decoder_sparse_step"), values.count("first_k_dense_replace", least=0)
    dense = values("mlp_only_layers") or ()
    mixtures = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(first, layers))
    correction = family in ("glm4_moe", "minimax_m2", *_LATENT)
    return Experts(count, active, size, shared, mixtures, family == "gpt_oss", correction)


def _latent(values: Values) -> Latent:
    rank = None if values("q_lora_rank") is None else values.count("q_lora_rank")
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(rank, *(values.count(key) for key in keys))


def _layers(values: Values, family: str, count: int) -> tuple[LayerConfig, ...]:
    """Full attention, or windows where `layer_types` says so; without types, where a window is in use."""
    if family in _LINEAR:
        return tuple(LayerConfig(has_state=kind == "linear_attention") for kind in layer_kinds(values, count))
    kinds = values("layer_types")
    if kinds is None:
        sliding = family == "gpt_oss" or values.flag("use_sliding_window") or family == "mixtral"
        every = 2 if family == "gpt_oss" else 1  # which alternates, windows first
        windowed = sliding and values("sliding_window") is not None
        kinds = [
            "sliding_attention" if windowed and layer % every == 0 else "full_attention" for layer in range(count)
        ]
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        text = f"has to name full_attention or sliding_attention for each of num_hidden_layers={count}"
        raise ConfigError("layer_types", kinds, text)
    window = values.count("sliding_window") if "sliding_attention" in kinds else None
    return tuple(LayerConfig(sliding_window=window if kind != "full_attention" else None) for kind in kinds)
