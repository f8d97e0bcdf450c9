"""Reads the options of a decoder from a model's configuration: the values of a config.json.

Keys and defaults (families.json) are those of transformers' configuration classes, for the families that the
decoder computes. transformers itself is not needed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, shown
from kvlab.models.config import ACTIVATIONS, DecoderConfig, LayerConfig, RopeConfig, eos_token_ids
from kvlab.models.files import read_object
from kvlab.models.gguf import is_gguf, read_gguf
from kvlab.models.gguf_config import config_values
from kvlab.models.hub import HubError, hub_file
from kvlab.models.published import located
from kvlab.models.sparse_reader import SPARSE, STATES, read_sparse
from kvlab.models.values import POSITIVE, Family, Values, is_positive

_KINDS: dict[str, Family] = {
    name: Family(**values)
    for name, values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
DEFAULTS = {name: family.defaults for name, family in _KINDS.items()}

#: Values of `model_type`. `gemma3` is multimodal: its `text_config` is a gemma3_text.
FAMILIES = tuple(sorted([*_KINDS, "gemma3"]))

_ROPE_KEYS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
#: What each type of rotary angles needs, in the order of RopeConfig's fields.
_ROPE_TYPES = {"default": _ROPE_KEYS[:1], "linear": _ROPE_KEYS[:2], "llama3": _ROPE_KEYS}
_THETA = 10_000.0  # of a model that names none
_MOST_LAYERS = 10_000
_THEIRS = ", or model.implementation=transformers"  # for what kvlab's own decoder does not compute


def decoder_config(model: ModelConfig, *, simulated: bool = False) -> DecoderConfig:
    """The decoder that a model setting describes: by `model.path`, else by `model.architecture`; `simulated`: as
    devices hold it that a serving framework runs on, where mixtures of experts are `SparseConfig`s.

    Raises ConfigError for a family that neither kvlab nor, where `model.implementation` allows it, transformers
    computes, values that no decoder can have, or a `model.path` without a readable config.json and that is no
    readable GGUF file. Code that the file names is never run.
    """
    if model.path is None:
        try:
            values = {**model.architecture, "model_type": model.family}
            if not simulated and model.family in SPARSE and model.weights == "dummy":
                values.pop("quantization_config", None)  # of published weights
            config = _read(values, model.implementation, simulated)
        except ConfigError as error:
            key = "model.family" if error.key == "model_type" else error.key
            raise ConfigError(key, error.value, error.reason) from error
    else:
        where = located(model.path)
        file = Path(where) if is_gguf(where) else _config_file(where)
        try:
            values = config_values(read_gguf(file)) if is_gguf(where) else read_object(file)
        except ValueError as error:
            subject = "" if str(file) == model.path else f"{file} "
            raise ConfigError("model.path", model.path, f"{subject}{error}") from error
        try:
            config = _read(values, model.implementation, simulated)
        except ConfigError as error:
            raise ConfigError(error.key, error.value, f"{error.reason} (in {file})") from error
    if model.max_seq_len > config.max_position_embeddings:
        reason = f"{model.name} has positions up to {config.max_position_embeddings}"
        raise ConfigError("model.max_seq_len", model.max_seq_len, reason)
    return config


def value_of(path: str | None, architecture: Mapping[str, Any], key: str) -> Any:
    """A value of a model's configuration, in a multimodal one of its language model; None: it has none, or is not
    on this machine.
    """
    values: Mapping[str, Any] = architecture
    if path is not None and values.get(key) is None:
        try:
            where = located(path)
            values = (
                config_values(read_gguf(Path(where)))
                if is_gguf(where)
                else read_object(Path(where) / "config.json")
            )
        except (OSError, ValueError):
            return None
    found, inner = values.get(key), values.get("text_config")
    if found is None and isinstance(inner, Mapping):
        found = inner.get(key)
    return found


def number_of(path: str | None, architecture: Mapping[str, Any], key: str) -> int | None:
    """The same of a whole number; None also for another value."""
    found = value_of(path, architecture, key)
    return found if isinstance(found, int) else None


def _read(values: Mapping[str, Any], implementation: str, simulated: bool) -> DecoderConfig:
    """kvlab's decoder of a family that it knows, else transformers'; or the one that is asked for."""
    if simulated and values.get("model_type") in SPARSE:
        return read_sparse(values)
    if isinstance(family := values.get("model_type"), str) and family in STATES:
        text = f"has layers with {STATES[family]}, which simulated devices alone have"
        raise ConfigError("model_type", family, f"{text}; set hardware=, as hardware=h100_sxm")
    if implementation == "kvlab" or (implementation == "auto" and values.get("model_type") in FAMILIES):
        return read_config(values)
    try:
        from kvlab.models.transformers_plan import describe
    except ImportError as error:
        if implementation == "auto":
            return read_config(values)
        reason = f"transformers cannot be imported ({shown(error)})"
        raise ConfigError("model.implementation", implementation, reason) from error
    return describe(values, own=FAMILIES)


def _config_file(where: str) -> Path:
    """The config.json of a directory or of a hub id, which is downloaded once."""
    file = Path(where) / "config.json"
    if os.path.lexists(file):
        return file
    if "/" not in where.strip("./") or where.startswith(("/", "./", "../")) or os.path.lexists(where):
        reason = "is not the path of a directory, and no id of a hub, which are as Qwen/Qwen3-0.6B"
        if os.path.isdir(where):
            reason = "there is no config.json in this directory"
        raise ConfigError("model.path", where, reason)
    try:
        return hub_file(where, "config.json")
    except HubError as error:
        advice = "give a directory that holds config.json, or the id of a hub this machine can reach"
        reason = f"no model configuration there ({error}); {advice}"
        raise ConfigError("model.path", where, reason) from error


def _object(key: str, value: Any) -> Mapping[str, Any]:
    """Values by key; null has none."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(key, value, "has to be an object, or null")
    return value or {}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that the values of a config.json describe. Raises ConfigError for what cannot be computed.

    Of a multimodal model (`gemma3`) the language model is taken, and served without images.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        code = ", and kvlab never runs the code that its auto_map names" if "auto_map" in config else ""
        raise ConfigError("model_type", family, f"unknown family{code}; known: {', '.join(FAMILIES)}")
    if family == "gemma3":
        text = _object("text_config", config.get("text_config"))
        family, eos, config = "gemma3_text", config.get("eos_token_id"), text
        config = config if eos is None else {**config, "eos_token_id": eos}
    values = Values(_KINDS[family], config)
    activation_key = values.family.activation_key
    if values(activation_key) not in ACTIVATIONS:  # a value that cannot be hashed is not in there either
        raise ConfigError(
            activation_key, values(activation_key), f"unknown; known: {', '.join(ACTIVATIONS)}{_THEIRS}"
        )
    if values.flag("mlp_bias"):
        raise ConfigError("mlp_bias", True, f"the feed-forward has no biases; only false{_THEIRS}")
    if values.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention", True, "a decoder attends to what is before; only false")
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = values.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    if values("head_dim") is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"does not divide hidden_size={hidden}; give head_dim")
    head_dim = values.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise ConfigError("head_dim", head_dim, "has to be even: rotary angles turn pairs of numbers")
    bias, vocab_size = values.flag("attention_bias"), values.count("vocab_size")
    options = {"qkv_bias": bias, "output_bias": bias, **values.family.options}
    return DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size"),
        layers=_layers(values),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=(values.number("query_pre_attn_scalar") if values.family.is_scaled else head_dim) ** -0.5,
        rms_norm_eps=values.number("rms_norm_eps"),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=eos_token_ids(values("eos_token_id"), vocab_size),
        activation=values(activation_key),
        embedding_scale=hidden**0.5 if values.family.is_scaled else None,
        # transformers 5 leaves this cap of Gemma 3 out; published checkpoints have none.
        attention_soft_cap=values.optional_number("attn_logit_softcapping"),
        logit_soft_cap=values.optional_number("final_logit_softcapping"),
        **options,
    )


def _layers(values: Values) -> tuple[LayerConfig, ...]:
    count, kinds = values.count("num_hidden_layers", most=_MOST_LAYERS), values("layer_types")
    pattern = values.family.window_pattern
    windowed = pattern is not None or values.flag("use_sliding_window")
    window = values.count("sliding_window") if windowed and values("sliding_window") is not None else None
    if kinds is None:
        if pattern is not None:
            every = values.count("sliding_window_pattern", default=pattern)
            full = range(every - 1, count, every)
        else:
            full = range(count if window is None else values.count("max_window_layers", default=count, least=0))
        kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(count)]
    if isinstance(kinds, str) or not (isinstance(kinds, Sequence) and all(isinstance(kind, str) for kind in kinds)):
        raise ConfigError("layer_types", kinds, "has to be a list of names")
    if len(kinds) != count:
        raise ConfigError("layer_types", kinds, f"names {len(kinds)} layers of num_hidden_layers={count}")
    layers = {kind: _layer(values, kind, window) for kind in dict.fromkeys(kinds)}
    return tuple(layers[kind] for kind in kinds)


def _layer(values: Values, kind: str, window: int | None) -> LayerConfig:
    if kind == "full_attention":
        return LayerConfig(_rope(values, kind))
    if kind != "sliding_attention":
        raise ConfigError("layer_types", kind, "unknown; known: full_attention, sliding_attention")
    if window is None:
        raise ConfigError("sliding_window", window, "layer_types has sliding layers: give a number of tokens")
    return LayerConfig(_rope(values, kind), window)


def _rope(values: Values, kind: str) -> RopeConfig:
    """The rotary angles of a kind of layer. Published files have `rope_theta` and `rope_scaling`; those that
    transformers 5 wrote have both in `rope_parameters`, with a set for each kind of layer where they differ.
    """
    scaling, parameters = (_object(key, values(key)) for key in ("rope_scaling", "rope_parameters"))
    key, theta_key, theta = "rope_parameters", "rope_theta", _THETA
    if values.family.full_theta is not None:
        key = f"{key}.{kind}"
        parameters = _object(key, parameters.get(kind)) or {"rope_type": "default"}
        if kind == "full_attention":
            parameters, theta = {**parameters, **scaling}, values.family.full_theta
        else:
            theta_key = "rope_local_base_freq"
    else:
        parameters = scaling or parameters
        if any(isinstance(value, Mapping) for value in parameters.values()):
            key, own = f"{key}.{kind}", parameters.get(kind)
            if own is None:
                raise ConfigError(key, None, "needs at least rope_theta")
            parameters = _object(key, own)
    parameters = {
        "rope_type": parameters.get("type", "default"),
        "rope_theta": theta if values(theta_key) is None else values(theta_key),
        "partial_rotary_factor": values("partial_rotary_factor"),
        "original_max_position_embeddings": values("max_position_embeddings"),
        **parameters,
    }
    rope_type, partial = parameters["rope_type"], parameters["partial_rotary_factor"]
    if rope_type not in tuple(_ROPE_TYPES):
        raise ConfigError(f"{key}.rope_type", rope_type, f"unknown; known: {', '.join(_ROPE_TYPES)}{_THEIRS}")
    if partial not in (None, 1.0):
        raise ConfigError(f"{key}.partial_rotary_factor", partial, f"whole heads are rotated; only 1.0{_THEIRS}")
    numbers: list[Any] = [parameters.get(name) for name in _ROPE_TYPES[rope_type]]
    for name, number in zip(_ROPE_KEYS, numbers, strict=False):
        if not is_positive(number):
            raise ConfigError(f"{key}.{name}", number, f"rope_type={rope_type} needs {POSITIVE}")
    rope = RopeConfig(*numbers)
    if rope.high_freq_factor <= rope.low_freq_factor:
        reason = f"has to be above low_freq_factor={rope.low_freq_factor}"
        raise ConfigError(f"{key}.high_freq_factor", rope.high_freq_factor, reason)
    return rope
