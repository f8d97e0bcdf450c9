"""The cache of a configuration: what it stores for a token, and the size of its pool."""

from dataclasses import replace

from kvlab.config import EngineConfig
from kvlab.config.server_defaults import keeps_states_within_steps
from kvlab.errors import ConfigError
from kvlab.kv.groups import STATE, LayerGroup, layer_groups
from kvlab.kv.pools import POOLS
from kvlab.kv.sizing import PoolSize, size_pool
from kvlab.kv.spec import INT4_GROUP, KVSpec
from kvlab.models.config import DecoderConfig
from kvlab.models.sparse import SparseConfig


def kv_spec(config: EngineConfig, model: DecoderConfig) -> KVSpec:
    """What the cache stores for a token, in groups of layers if some have a sliding window that sequences leave.

    Raises ConfigError for heads or latents that a format cannot hold, where it saves nothing, and for what the
    groups refuse.
    """
    if isinstance(model, SparseConfig) and model.latent is not None:
        _check_latent(config)
    # Serving frameworks, which simulated devices stand for, have one scale in fp8 for a whole tensor.
    spec = replace(model.kv_spec(*config.kv_dtypes), tensor_scales=config.hardware is not None)
    plain = model.kv_spec(config.executor.dtype)
    for name, own, dtype in zip(
        ("key", "value"), (config.kv.key_dtype, config.kv.value_dtype), spec.dtypes, strict=True
    ):
        key = "kv.dtype" if own is None else f"kv.{name}_dtype"
        if dtype == "int4" and model.head_dim % INT4_GROUP:
            text = f"has a scale for every {INT4_GROUP} numbers, which heads of {model.head_dim} are no multiple of"
            raise ConfigError(key, dtype, f"{text}; use int8, fp8_e4m3 or auto")
        one = model.kv_spec(dtype).bytes_per_token
        if dtype != plain.dtype and one >= plain.bytes_per_token:
            text = f"with their scales, heads of {model.head_dim} numbers take {one} bytes per token"
            instead = f"in {plain.dtype} {plain.bytes_per_token}; use {key}=auto"
            raise ConfigError(key, dtype, f"{text} and {instead}")
    return replace(spec, groups=_groups(config, model))


def _check_latent(config: EngineConfig) -> None:
    """Raise ConfigError for what latents are not stored in."""
    text = "latent attention stores one latent for K and V"
    if (value := config.kv.value_dtype) is not None:
        raise ConfigError("kv.value_dtype", value, f"{text}; leave it null")
    if (dtype := config.kv_dtypes[0]) in ("int8", "int4"):
        key = "kv.dtype" if config.kv.key_dtype is None else "kv.key_dtype"
        raise ConfigError(key, dtype, f"{text}, in 16 bits or fp8; use fp8_e4m3 or auto")


def planned_pool(config: EngineConfig, spec: KVSpec) -> PoolSize:
    """The pool's size. Raises CapacityError where not one block fits."""
    scheduler = config.scheduler
    return size_pool(
        config.kv,
        spec,
        max_batch_size=scheduler.max_batch_size,
        max_seq_len=config.model.max_seq_len,
        step_tokens=scheduler.step_tokens,
        ahead=scheduler.ahead,
        parts=config.executor.attention_data_parallel,
    )


def _states_at_once(config: EngineConfig, model: DecoderConfig) -> int:
    """Blocks of states that a sequence holds at most, of each group of layers that have states: its own; beside it
    the one that a step begins with, where prefixes are found; and the last of a prompt that others may find, where
    kernels write it in the middle of a step.
    """
    if not isinstance(model, SparseConfig) or model.states is None:
        return 0
    if not config.kv.prefix_sharing:
        return 1
    return 3 if keeps_states_within_steps(config, flashinfer=model.states.flashinfer) else 2


def _groups(config: EngineConfig, model: DecoderConfig) -> tuple[LayerGroup, ...]:
    """Groups of the layers; (): all need all of a sequence. Raises ConfigError for what groups do not support."""
    kinds = [
        STATE if layer.has_state else layer.sliding_window for layer in model.layers if not layer.is_feed_forward
    ]
    groups = layer_groups(kinds, config.model.max_seq_len, _states_at_once(config, model))
    windows = [group.window for group in groups if group.window is not None]
    frees, has_states = POOLS.get(config.kv.backend).frees_windows, STATE in kinds
    if has_states and not (config.kv.windows and frees):
        able = next(name for name in POOLS.names() if POOLS.get(name).frees_windows)
        key, value, use = ("windows", False, "true") if frees else ("backend", config.kv.backend, able)
        text = f"{model.states_called} of {config.model.name} has a state for each sequence, in a block of its own"
        raise ConfigError(f"kv.{key}", value, f"{text}; use kv.{key}={use}")
    if not (config.kv.windows and windows and frees):
        return ()
    keep, instead = f"layers of {config.model.name} keep the last {min(windows):,} tokens", "kv.windows=false"
    if has_states:
        keep, instead = f"{model.states_called} of {config.model.name} keeps one state of a sequence", ""
    if config.kv.pinned_share:
        text = f"pins whole prefixes, and {keep}; use {instead or 'kv.pinned_share=0'}"
        raise ConfigError("kv.pinned_share", config.kv.pinned_share, text)
    if (mode := config.scheduler.preemption.mode) == "swap":
        text = f"copies whole sequences, and {keep}; use {', or '.join(filter(None, (instead, 'recompute')))}"
        raise ConfigError("scheduler.preemption.mode", mode, text)
    return groups
