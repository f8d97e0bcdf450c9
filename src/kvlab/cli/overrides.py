"""What a user writes on the command line, before Hydra reads it: keys are checked, short forms written out."""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import get_origin

from kvlab.cli.settings import OWN_KEYS, schema_keys
from kvlab.cli.shortcuts import expanded
from kvlab.config import RunConfig
from kvlab.errors import ConfigError
from kvlab.paths import CONF
from kvlab.secrets import redacted

_GROUPS = ("sweep", "experiment")  # choices that are no settings
_OF_A_GROUP = r"fleet\.groups\.\d+\.\w.*"  # that is written before it
_LENGTHS = ("workload.prompt_len", "workload.output_len")
#: What vLLM and SGLang call a setting, as docs/glossary.md has it, and common short names.
ALIASES = {
    "max_num_seqs": "scheduler.max_batch_size",
    "max_running_requests": "scheduler.max_batch_size",
    "batch_size": "scheduler.max_batch_size",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_prefill_tokens": "scheduler.max_batched_tokens",
    "chunked_prefill_size": "scheduler.max_batched_tokens",
    "long_prefill_token_threshold": "scheduler.long_prefill_threshold",
    "scheduling_policy": "scheduler.order",
    "schedule_policy": "scheduler.order",
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
_OF_COMMANDS = {  # settings of one command that are given to another
    "port": "is a setting of kvlab serve: server.port",
    "host": "is a setting of kvlab serve: server.host",
    "memory": "is a setting of kvlab capacity and kvlab tune; a run's cache has kv.memory",
}


def written_out(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them, behind its flags: `workload.prompt_len=8000` is of exactly 8,000 tokens,
    and choices in `conf/` of the working directory are found. Raises ConfigError for a key that there is not.
    """
    texts = [_written_out(text) for text in overrides]
    try:
        folder = Path("conf").absolute()
    except OSError:  # the working directory was removed, which is said later
        return texts
    texts = expanded(texts, [folder])
    # A flag between overrides, as -m, makes Hydra's parser take those behind it for unknown arguments.
    texts.sort(key=lambda text: text.startswith("~") or ("=" in text and not text.startswith("-")))
    is_named = any("searchpath" in text or "config-dir" in text for text in texts)
    if folder.is_dir() and folder != CONF and not is_named and not {"-cd"} & set(texts):
        quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
        texts.append(f"hydra.searchpath=['file://{quoted}']")
    return texts


def _written_out(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key) or key.startswith("hydra"):
        return text
    if key in _LENGTHS and re.fullmatch(r"\d+(,\d+)*", value):
        return f"{key}=" + ",".join(f"{{min: {length}, max: {length}}}" for length in value.split(","))
    if re.fullmatch(_OF_A_GROUP, key):
        return f"++{text}"  # also of a group that was written without it
    check_key(key, value)
    return text


def check_key(key: str, value: str) -> None:
    """Raise ConfigError for a key that is no setting, or has settings of its own."""
    settings, sections, is_open = known_keys()
    if key in settings or key in _GROUPS or key.startswith(is_open):
        return
    if key in sections:
        if "." in key and not value.startswith(("{", "$", "[")):
            inner = ", ".join(name for name in settings if name.startswith(f"{key}."))
            raise ConfigError(key, redacted(key, value), f"has settings of its own: {inner}")
        return
    last = key.rpartition(".")[2]
    if key in _OF_COMMANDS:
        raise ConfigError(key, redacted(key, value), f"unknown to this command; it {_OF_COMMANDS[key]}")
    near = [ALIASES[last]] if last in ALIASES else []
    near += [name for name in settings if name.rpartition(".")[2] == last]
    if not near and len(last) > 3:
        longer = [name for name in (*settings, *sections) if name.rpartition(".")[2].startswith(f"{last}_")]
        group = key.rpartition(".")[0]
        near += [name for name in longer if name.rpartition(".")[0] == group] or longer[:2]
    own = OWN_KEYS.get()
    near += get_close_matches(key, own, n=1, cutoff=0.75) if not near else []
    near += get_close_matches(key, [*settings, *sections], n=1) if not near else []
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in settings}
        near = [leaves[leaf] for leaf in get_close_matches(last, leaves, n=1)]
    if near:
        text = f"unknown; did you mean {' or '.join(dict.fromkeys(near))}?"
    else:
        group = key.partition(".")[0]
        known = [name for name in settings if name.startswith(f"{group}.")] if "." in key else []
        known = known or [name.partition(".")[0] for name in (*own, *settings)]
        text = f"unknown; known: {', '.join(dict.fromkeys(known))}"
    raise ConfigError(key, redacted(key, value), text)


@cache
def known_keys() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The dotted keys of a run's settings, those of groups of them, and beginnings of keys that are open."""
    settings, sections, is_open = list[str](), list[str](), list[str]()
    for key, kind in schema_keys(RunConfig):
        if get_origin(kind) is dict:
            is_open.append(f"{key}.")
        (sections if is_dataclass(kind) else settings).append(key)
    return tuple(settings), tuple(sections), tuple(is_open)
