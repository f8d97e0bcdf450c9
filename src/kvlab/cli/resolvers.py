"""What `conf/` writes as ${kvlab_...}: defaults of simulated servers, this machine, names, the mode of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from kvlab.config import ExecutorConfig, KVConfig, ModelConfig, RunConfig, SchedulerConfig
from kvlab.config.executor import DTYPES
from kvlab.config.kv import KV_DTYPES
from kvlab.config.server_defaults import defaults_of, state_multiple
from kvlab.models.families import number_of, value_of
from kvlab.models.states import block_of_state, states_of
from kvlab.plugins import load_plugins
from kvlab.registry import KEYS, registry
from kvlab.secrets import take_from_environment

if TYPE_CHECKING:
    from kvlab.lab.results.roofline import MachineRates


def _mode(repeats: object) -> str | None:
    """The mode of a run: with `repeats` it is a sweep."""
    return "MULTIRUN" if str(repeats).isdigit() and int(str(repeats)) > 1 else None


def _names(plugins: Sequence[str]) -> str:
    """The settings that take the name of an implementation, with what there is for each."""
    load_plugins(plugins)
    return "\n".join(f"{key}: {', '.join(registry(key).names())}" for key in KEYS)


@cache  # so that a configuration that is read twice is the same
def _rates(dtype: str, threads: int | None) -> MachineRates:
    from kvlab.lab.machine_rates import rates_here

    return rates_here(dtype, threads)


def _here(what: str, timing: str = "", dtype: str = "", threads: int | None = None) -> Any:
    """What `hardware=here` is: this machine's memory, and for a roofline its rates."""
    from kvlab.lab.machine import total_memory

    if what == "memory":
        return f"{total_memory()}B"
    if timing not in ("auto", "roofline"):
        return {} if what == "tflops" else 0.0
    rates = _rates(dtype, threads)
    sustained = rates.product_flops_per_s or rates.flops_per_s
    return {dtype: sustained / 1e12} if what == "tflops" else rates.read_bytes_per_s / 1e9


def _default(name: str, *, _root_: DictConfig) -> Any:
    """A setting that nobody gave: on a simulated device what the framework's server has there, and the model's own
    context; else kvlab's, as for static batches, which no server forms.
    """
    if (defaults := defaults_of(_root_)) is None:
        return None if name in ("long_prefill_threshold", "chunk_unit") else getattr(_kind(name), name)
    scheduler, model = _root_.scheduler, _root_.model
    if name == "long_prefill_threshold":  # a prompt is computed by one group, within its share of a step's tokens
        groups = int(_root_.executor.attention_data_parallel)
        is_shared = groups > 1 and scheduler.policy != "static"
        return max(1, int(scheduler.max_batched_tokens) // groups) if is_shared else None
    if name == "chunk_unit":
        return defaults.chunk_unit(int(_root_.kv.block_size), scheduler)
    is_own = name in ("order", "reserve_output", "conservativeness") and scheduler.policy == "static"
    is_own |= name == "reserve_prompt" and (scheduler.policy == "static" or scheduler.reserve_output is True)
    is_own |= name == "conservativeness" and scheduler.reserve_output is not True  # of nothing
    is_own |= name in ("partial_reuse", "merge_equal") and not _root_.kv.prefix_sharing  # of what is not there
    is_own |= name == "merge_equal" and not _may_keep_equal(_root_.kv)
    is_own |= name == "aging_s" and scheduler.order != "priority"  # frameworks have none of the others that age
    if is_own:
        return getattr(_kind(name), name)
    if name == "max_seq_len":
        return number_of(model.path, model.architecture, "max_position_embeddings") or ModelConfig.max_seq_len
    if name in ("memory_utilization", "block_size"):
        latent = number_of(model.path, model.architecture, "kv_lora_rank") is not None
        tokens, sequences = int(scheduler.max_batched_tokens), int(scheduler.max_batch_size)
        block = _state_block(_root_) if name == "block_size" else None
        found = defaults_of(_root_, tokens=tokens, sequences=sequences, latent=latent, state_block=block)
        return getattr(found, name)
    if name == "max_batch_size":  # never more than a step's tokens
        return min(defaults.max_batch_size, int(_root_.scheduler.max_batched_tokens))
    return getattr(defaults, name)


def _may_keep_equal(kv: DictConfig) -> bool:
    """Whether equal blocks may both stay beside the other settings of the cache."""
    kept = [key for key in ("pinned_share", "pin_ttl_s", "ttl_s", "quota") if kv[key]]
    return KVConfig.may_keep_equal(str(kv.eviction), kept)


def _kind(name: str) -> type:
    """The part of a configuration that has such a setting."""
    kinds: dict[str, type] = {"max_seq_len": ModelConfig, "memory_utilization": ExecutorConfig}
    kinds |= dict.fromkeys(("block_size", "partial_reuse", "merge_equal"), KVConfig)
    return kinds.get(name, SchedulerConfig)


def _state_block(root: DictConfig) -> int | None:
    """Tokens of a block that holds a state of one of the model's layers; None: it has none."""
    executor, kv, model = root.executor, root.kv, (root.model.path, root.model.architecture)
    if (states := states_of(partial(value_of, *model))) is None:
        return None
    number = partial(number_of, *model)
    dtype, devices, queries = str(executor.dtype), int(executor.tensor_parallel), number("num_attention_heads") or 1
    heads = number("num_key_value_heads") or queries
    head_dim = number("head_dim") or (number("hidden_size") or 0) // max(1, queries)
    if min(heads, head_dim, devices) < 1 or dtype not in DTYPES:
        return None
    key, value = (str(own or kv.dtype) for own in (kv.key_dtype, kv.value_dtype))
    stored = {name: name for name in KV_DTYPES if name != "auto"}
    kv_dtypes = stored.get(key, dtype), stored.get(value, dtype)  # what is unknown is refused later
    multiple = state_multiple(root, flashinfer=states.flashinfer)
    return block_of_state(states, heads, head_dim, devices, dtype, kv_dtypes, multiple=multiple)


def _environment(name: str, *default: Any) -> str | None:
    """OmegaConf's own resolver, which notes what was taken: that is shown as it was written."""
    take_from_environment(name)
    TAKEN.append(name)
    value: str | None = oc.env(name, *default)
    return value


#: Names of what was taken from the environment, in order: who counts them before and after knows what a value has.
TAKEN: list[str] = []
# What conf/run.yaml refers to, so that no YAML names a Python object.
ConfigStore.instance().store(name="schema", node=RunConfig)
OmegaConf.register_new_resolver("kvlab_mode", _mode, replace=True)
OmegaConf.register_new_resolver("kvlab_names", _names, replace=True)
OmegaConf.register_new_resolver("kvlab_here", _here, replace=True)
OmegaConf.register_new_resolver("kvlab_default", _default, replace=True)
OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
