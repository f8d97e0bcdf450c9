"""Plans a decoder that transformers computes: what it stores for a token, what it weighs, what its attention needs.

A model's shapes and attention are not read from its keys, which differ from family to family. The model is built on
PyTorch's meta device, which has shapes and no memory, and run on two tokens there: what it then asks of attention
in each layer is the plan. So any decoder of the installed transformers can be planned whose attention goes through
transformers' `AttentionInterface`.

The values of a config.json are data here: they choose among the classes that are installed, by name. No code of a
checkpoint is imported, and nothing is downloaded.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)

from kvlab.errors import BackendError, ConfigError, shown
from kvlab.models.config import LayerConfig, TransformersConfig, WeightCounts, eos_token_ids

IMPLEMENTATION = "kvlab"  # the name of our attention function in transformers
_LAYER_KINDS = ("full_attention", "sliding_attention")
_MODULES = ("layer", "layers", "blocks", "experts")  # ends of keys that say how many there are
_MOST_MODULES = 1024
_UNLIMITED = 2**31 - 1  # positions of a model without a table of them
#: What concerns code, kernels and outputs is ours to choose, not a file's.
_OURS = (
    "auto_map", "attn_implementation", "experts_implementation", "output_attentions", "output_hidden_states",
    "return_dict", "use_cache", "dtype", "torch_dtype",
)  # fmt: skip
SINKS = "s_aux"  # a logit of each head
#: What a model may hand its attention without changing what is computed, or that a LayerCall says.
_HARMLESS = (
    SINKS, "dropout", "position_ids", "use_cache", "logits_to_keep", "output_attentions",
    "output_router_logits", "cache_position",
)  # fmt: skip


class LayerCall(NamedTuple):
    """What a layer asks of its attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # of a head's V
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


Attend = Callable[[LayerCall, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor]
_ATTEND: ContextVar[Attend | None] = ContextVar("attend", default=None)


@contextmanager
def attention_of(attend: Attend) -> Iterator[None]:
    """Every model that runs in this context gets its attention from `attend`."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it, over `[1, heads, T, head_dim]`."""
    attend, layer = _ATTEND.get(), getattr(module, "layer_idx", None)
    if attend is None:
        raise BackendError("a model with kvlab's attention runs in kvlab alone, where it has a cache")
    others["attention_mask"] = attention_mask
    others["attention to later tokens"] = False in (is_causal, getattr(module, "is_causal", None)) or None
    others["no number of the layer"] = layer is None or None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    heads = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    has_sinks = s_aux is not None
    call = LayerCall(-1 if layer is None else int(layer), *heads, scale, sliding_window, softcap, has_sinks)
    return attend(call, query, key, value, others | {SINKS: s_aux}), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def describe(values: Mapping[str, Any], *, own: tuple[str, ...] = ()) -> TransformersConfig:
    """The decoder that the values of a config.json describe. `own`: the families that kvlab computes itself, which
    the refusal of an unknown one names.

    Raises ConfigError, naming the family and what stands in the way, for a model that is no decoder, keeps a state
    beside K and V, or whose attention is none that a backend computes.
    """
    kept = {key: value for key, value in values.items() if not key.startswith("_") and key not in _OURS}
    return _describe(json.dumps(kept, sort_keys=True), "auto_map" in values, own)


@lru_cache(maxsize=8)
def _describe(text: str, names_code: bool, own: tuple[str, ...]) -> TransformersConfig:
    values = json.loads(text)
    family = values.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        code = ", and kvlab never runs the code that its auto_map names" if names_code else ""
        known = ", ".join([*own, f"and the decoders of transformers {__version__}"])
        raise ConfigError("model_type", family, f"unknown family{code}; known: {known}")
    for key, value in values.items():
        if key.endswith(_MODULES) and isinstance(value, int) and value > _MOST_MODULES:
            raise ConfigError(key, value, f"has to be at most {_MOST_MODULES}")
    try:
        if "quantization_config" in values:
            raise _Refused(
                "its weights are quantised (quantization_config); take the model that they were made from"
            )
        return _plan(read_values(values), text)
    except _Refused as error:
        raise ConfigError("model_type", family, str(error)) from error
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: classes check values in their own ways, or not before they run
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError("model_type", family, f"transformers takes no such values ({shown(reason)})") from error


class _Refused(Exception):
    """Why a family cannot be served."""


def _plan(config: PreTrainedConfig, text: str) -> TransformersConfig:
    """Raises _Refused, or whatever a model raises that is run with odd values, or on no data."""
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise _Refused("has an encoder, or is one; only models that are decoders and nothing else are served")
    if config.get_text_config() is not config:
        raise _Refused("has more parts than a language model; give the config.json of its text model alone")
    model_class = causal_model(config)
    if model_class is None:
        raise _Refused("transformers has no causal language model of this family")
    others = sorted(set(map(str, getattr(config, "layer_types", None) or [])) - set(_LAYER_KINDS))
    if model_class._is_stateful or others:
        names = f" ({', '.join(map(shown, others))})" if others else ""
        what = f"has layers{names} with a state or a mask of their own"
        raise _Refused(f"{what}; only full and sliding-window attention is served")
    with torch.device("meta"):
        model = build_empty(model_class, config, torch.bfloat16)
    calls, vocab_size = _calls(model)
    layer = _checked(config, calls)
    counts = _count(model)
    return TransformersConfig(
        family=config.model_type,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        layers=tuple(LayerConfig(sliding_window=call.window) for call in calls),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        attention_scale=layer.scale,
        tie_word_embeddings=not counts.embedding,
        max_position_embeddings=_positions(config),
        eos_token_ids=eos_token_ids(config.eos_token_id, vocab_size),
        attention_soft_cap=layer.soft_cap,
        value_dim=layer.value_dim,
        has_sinks=layer.has_sinks,
        values=text,
        counts=counts,
    )


def read_values(values: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' configuration. Raises whatever its class raises for wrong values."""
    kept = {key: value for key, value in values.items() if key != "model_type"}
    return CONFIG_MAPPING[values["model_type"]](**kept)


def left_out(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Those of `keys` for which transformers' class would put a number, as a config.json has none; by the
    family's names for them. A family that is unknown leaves out nothing.
    """
    family = values.get("model_type")
    if family not in CONFIG_MAPPING:
        return []
    kind = CONFIG_MAPPING[family]
    names = {key: kind.attribute_map.get(key, key) for key in keys}
    numbers = [key for key, name in names.items() if isinstance(getattr(kind, name, None), int)]
    return [names[key] for key in numbers if values.get(key) is None and values.get(names[key]) is None]


def causal_model(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' own class for a configuration; None: it has none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind: type[PreTrainedModel] = known[0] if isinstance(known, list | tuple) else known
    return kind


def build_empty(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the current device, with kvlab's attention, as transformers builds it for a configuration."""
    return kind._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What of a model is in its checkpoint, by transformers' names: a tied weight once."""
    names: dict[int, str] = {}
    every = model.state_dict(keep_vars=True)
    for name, tensor in every.items():
        names.setdefault(id(tensor), name)
    return {name: every[name] for name in names.values()}


def _calls(model: PreTrainedModel) -> tuple[list[LayerCall], int]:
    """What the layers of a model on the meta device ask of attention, in order; and the width of its logits."""
    calls: list[LayerCall] = []

    def record(
        call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: Mapping[str, Any]
    ) -> torch.Tensor:
        changing = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
        if changing or not query.shape[2] == key.shape[2] == value.shape[2] == 2:
            asked = ", ".join(changing) or f"{key.shape[2]} keys for {query.shape[2]} tokens"
            raise _Refused(f"asks of the attention of layer {call.layer} what no backend computes: {asked}")
        calls.append(call)
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    for module in model.modules():
        if isinstance(kinds := getattr(module, "rope_type", None), str | dict):
            # Angles may depend on the positions of a batch, of which there are none here.
            module.rope_type = "default" if isinstance(kinds, str) else dict.fromkeys(kinds, "default")
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with torch.inference_mode(), attention_of(record):
        logits = model(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True).logits
    return calls, int(logits.shape[-1])


def _checked(config: PreTrainedConfig, calls: list[LayerCall]) -> LayerCall:
    """The call that stands for all layers."""
    count = config.num_hidden_layers
    if not calls:
        raise _Refused("never calls transformers' attention interface, so that its attention cannot be replaced")
    if [call.layer for call in calls] != list(range(count)):
        raise _Refused(f"calls attention {len(calls)} times in {count} layers, and has to once in each")
    first = calls[0]
    if first.value_dim > first.head_dim:
        raise _Refused(f"has heads of {first.head_dim} numbers in K and {first.value_dim}, which is more, in V")
    kinds = getattr(config, "layer_types", None)
    window = None if kinds else getattr(config, "sliding_window", None)
    for call in calls:
        if call != first._replace(layer=call.layer, window=call.window):
            raise _Refused(f"layers 0 and {call.layer} differ in heads, scale or cap, and may only in their window")
        slides = kinds[call.layer] == "sliding_attention" if kinds else window is not None
        if slides != (call.window is not None):
            raise _Refused(f"layer {call.layer} does not tell its attention which window it has")
    return first


def _count(model: PreTrainedModel) -> WeightCounts:
    table, layer = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = table if layer is None else layer.weight
    body = rows = norms = biases = largest = experts = 0
    for name, weight in stored_tensors(model).items():
        count = weight.numel()
        largest = max(largest, count)
        if weight is table or weight is head:
            continue
        experts += count if ".experts." in name else 0
        if weight.dim() > 1:
            body, rows = body + count, rows + count // weight.shape[-1]
        elif name.endswith("bias"):
            biases += count
        else:
            norms += count
    embedding = 0 if head is table else table.numel()
    return WeightCounts(body, rows, head.numel(), embedding, norms, biases, largest, experts)


def _intermediate_size(config: PreTrainedConfig) -> int:
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list | tuple) else int(size)


def _positions(config: PreTrainedConfig) -> int:
    """Positions that a model has. Angles that change for a whole batch as soon as one sequence is longer than the
    original context (longrope) can be had only up to there.
    """
    most = getattr(config, "max_position_embeddings", None) or _UNLIMITED
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(own for own in rope.values() if isinstance(own, dict))):  # one, or one by kind of layer
        if kind.get("rope_type") == "longrope":
            most = min(most, kind["original_max_position_embeddings"])
    return int(most)
