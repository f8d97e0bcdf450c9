"""Which settings there are, and what others call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

#: The settings of the command that runs, beside those of a run: what a key that is neither may have meant.
OWN_KEYS: ContextVar[tuple[str, ...]] = ContextVar("OWN_KEYS", default=())
#: What vLLM and SGLang call a setting, as docs/glossary.md has it, and common short names.
ALIASES = {
    "max_num_seqs": "scheduler.max_batch_size",
    "max_running_requests": "scheduler.max_batch_size",
    "batch_size": "scheduler.max_batch_size",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_prefill_tokens": "scheduler.max_batched_tokens",
    "chunked_prefill_size": "scheduler.max_batched_tokens",
    "long_prefill_token_threshold": "scheduler.long_prefill_threshold",
    "enable_chunked_prefill": "scheduler.chunk_unit",
    "scheduling_policy": "scheduler.order",
    "schedule_policy": "scheduler.order",
    "schedule_conservativeness": "scheduler.conservativeness",
    "gpu_memory_utilization": "executor.memory_utilization",
    "mem_fraction_static": "executor.memory_utilization",
    "kv_cache_memory_bytes": "kv.memory",
    "num_gpu_blocks_override": "kv.num_blocks",
    "page_size": "kv.block_size",
    "enable_prefix_caching": "kv.prefix_sharing",
    "disable_radix_cache": "kv.prefix_sharing",
    "radix_eviction_policy": "kv.eviction",
    "kv_cache_dtype": "kv.dtype",
    "swap_space": "kv.offload",
    "max_model_len": "model.max_seq_len",
    "context_length": "model.max_seq_len",
    "tensor_parallel": "executor.tensor_parallel",
    "tensor_parallel_size": "executor.tensor_parallel",
    "tp_size": "executor.tensor_parallel",
    "tp": "executor.tensor_parallel",
    "dtype": "executor.dtype",
    "quantization": "executor.weights",
    "attention_backend": "attention.backend",
    "request_rate": "workload.rate",
    "qps": "workload.rate",
    "rps": "workload.rate",
    "num_prompts": "workload.num_requests",
    "max_concurrency": "workload.concurrency",
    "input_len": "workload.prompt_len",
    "random_input_len": "workload.prompt_len",
    "random_output_len": "workload.output_len",
    "gpu": "hardware",
    "device": "executor.device",
}


def schema_keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a schema and its type, `X | None` counting as X; behind a dataclass its own keys, with dots."""
    for name, hint in get_type_hints(schema).items():
        kinds = get_args(hint)
        kind = next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else hint
        yield f"{prefix}{name}", kind
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(kind, f"{prefix}{name}.")


@cache
def known_keys() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The dotted keys of a run's settings, those of groups of them, and beginnings of keys that are open."""
    from kvlab.config import RunConfig  # so that --help answers at once

    settings, sections, is_open = list[str](), list[str](), list[str]()
    for key, kind in schema_keys(RunConfig):
        if get_origin(kind) is dict:
            is_open.append(f"{key}.")
        (sections if dataclasses.is_dataclass(kind) else settings).append(key)
    return tuple(settings), tuple(sections), tuple(is_open)


def kind_of(key: str) -> Any:
    """The type of a run's setting; None: it is none."""
    from kvlab.config import RunConfig

    return dict(schema_keys(RunConfig)).get(key)


def meant(option: str) -> str | None:
    """The setting that an option stands for, as those of vLLM's and SGLang's servers; None: not known."""
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    settings, sections, _ = known_keys()
    if name in ALIASES or name in (*settings, *sections):
        return ALIASES.get(name, name)
    return next((key for key in (*OWN_KEYS.get(), *settings) if key.rpartition(".")[2] == name), None)
