"""kvlab capacity: how many sequences fit in a memory, with contiguous slots and with pages.

kvlab capacity model=qwen3_4b memory=16GiB
kvlab capacity model=qwen3_4b memory=16GiB kv.dtype=int8 executor.weights=int8 model.max_seq_len=8192
kvlab capacity model=llama3_1_70b hardware=h100_sxm tensor_parallel=4 executor.weights=fp8 kv.dtype=fp8_e4m3
kvlab capacity model=/models/llama memory=24GiB lengths=500,2000     a directory, its config.json, a GGUF file

Any setting of `kvlab run` may follow; model= may also name a directory with a config.json, that file, or a GGUF
file; kv.memory= or kv.num_blocks= sizes the cache alone; of a fleet a replica of each kind is planned.
Nothing is built and nothing is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import command, setting
from kvlab.config import parse_bytes
from kvlab.errors import ConfigError, KvlabError
from kvlab.lab.settings import key_of

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.lab.capacity import CapacityPlan


@dataclass
class CapacitySettings:
    """The settings of the planner beside those of a run."""

    memory: str | None = setting(
        None, "of the device, for weights, cache and working memory; else what this machine has free", "SIZE"
    )
    tensor_parallel: int | None = setting(
        None, "devices or, without hardware=, processes; short for executor.tensor_parallel", "N"
    )
    lengths: list[int] = setting(
        [], "mean lengths in tokens; 256, doubled up to model.max_seq_len, unless given", "N,N"
    )
    json: bool = setting(False, "every figure, and what it was computed from, as JSON; or --json", "true")

    def __post_init__(self) -> None:
        if self.memory is not None and parse_bytes(self.memory, key="memory") == 0:
            raise ConfigError("memory", self.memory, "must be more than 0 bytes")
        for length in self.lengths:
            if length < 1:
                text = "mean lengths are whole numbers of tokens from 1 on, such as 256,512"
                raise ConfigError("lengths", length, text)


def configured(settings: CapacitySettings, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The run that is planned, and its words. Raises a KvlabError."""
    from kvlab.cli.compose import compose_one
    from kvlab.lab.model_file import check_model_file

    chosen = list(overrides)
    if (devices := settings.tensor_parallel) is not None:
        if any(key_of(text) == "executor.tensor_parallel" for text in chosen):
            raise ConfigError("tensor_parallel", devices, "executor.tensor_parallel is given too; give one of them")
        chosen.append(f"executor.tensor_parallel={devices}")
    config = compose_one(chosen, "the planner", fleets="simulated")
    if config.model.path is not None:
        file = Path(config.model.path).expanduser() / "config.json"
        if file.is_file():  # else the id of a hub, or an error with a name of its own
            check_model_file(file)
    return config, chosen


def plans(settings: CapacitySettings, config: RunConfig) -> dict[str, CapacityPlan]:
    """Compute every figure: of a replica of each group by its name, where there are several; else of "". Raises a
    KvlabError.
    """
    from kvlab.config.groups import of_group, with_settings

    planned = {}
    for group in config.fleet.parts:
        try:
            planned[group.name] = _plan(settings, with_settings(config, group.settings))
        except KvlabError as error:
            raise of_group(error, group.name) from error
    return planned or {"": _plan(settings, config)}


def _plan(settings: CapacitySettings, config: RunConfig) -> CapacityPlan:
    from kvlab.lab.capacity import plan_capacity
    from kvlab.lab.machine import available_memory
    from kvlab.planning.settings import resolve_device

    # A GPU can be planned for where there is none.
    device = config.executor.device
    device = resolve_device("auto") if device == "auto" else device
    memory = None if settings.memory is None else parse_bytes(settings.memory, key="memory")
    if config.hardware is not None:
        config.hardware.refuse_memory(settings.memory)
        return plan_capacity(config, device="cuda", lengths=settings.lengths or None)
    if config.executor.kind == "simulated":
        raise ConfigError("hardware", None, "executor=simulated needs a device, as hardware=h100_sxm")
    if memory is None and config.kv.memory is None and config.kv.num_blocks is None:
        if device == "cuda" and resolve_device("auto") != "cuda":
            raise ConfigError("memory", None, "there is no CUDA device here; say how much one has: memory=80GiB")
        memory = available_memory(device)
    return plan_capacity(config, device=device, memory=memory, lengths=settings.lengths or None)


@command(__doc__, CapacitySettings)
def main(settings: CapacitySettings, overrides: list[str]) -> int:
    config, words = configured(settings, overrides)
    planned = plans(settings, config)
    if settings.json:
        replicas = {group.name: group.replicas for group in config.fleet.parts} or {"": config.fleet.replicas}
        figures = {name: {"replicas": replicas[name]} | own.as_dict() for name, own in planned.items()}
        print(json.dumps(figures.get("", figures), indent=2))
        return 0
    from kvlab.engine.executors.simulated import is_untimed
    from kvlab.lab.advice_line import advice_line, drawn_requests
    from kvlab.lab.capacity_text import show_plan
    from kvlab.lab.terminal import Terminal

    for name, own in planned.items():
        if name or config.fleet.replicas > 1:
            print(f"each replica of {name}, " if name else f"each of {config.fleet.replicas} replicas, ", end="")
        show_plan(own, Terminal())
    line = advice_line(words, drawn_requests(config.workload))
    if line and not any(is_untimed(own.model) for own in planned.values()):
        print(line)
    return 0
