"""Which settings a choice reads: what was set and has no effect is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from kvlab.config.run import RunConfig
from kvlab.config.workload import FILES
from kvlab.registry import registry


class Condition(NamedTuple):
    """A setting that only some choices read."""

    key: str
    is_read: Callable[[RunConfig], bool]
    by: str  # what reads it, in words


def _chosen(key: str, *names: str) -> Callable[[RunConfig], bool]:
    """Whether one of these is chosen, or one that is not kvlab's own, which may read anything."""

    def is_read(config: RunConfig) -> bool:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        return value in names or value not in registry(key).own_names()

    return is_read


def _is_simulated(config: RunConfig) -> bool:
    return config.executor.kind == "simulated" or config.hardware is not None


def _is_synthetic(config: RunConfig) -> bool:
    return config.workload.source == "synthetic"


#: The settings that not every choice reads, beside those that their own checks refuse. The page of all settings has
#: them as a table.
CONDITIONS = (
    Condition("scheduler.max_wait_ms", _chosen("scheduler.policy", "static"), "scheduler=static"),
    Condition(
        "scheduler.max_decode_seqs",
        _chosen("scheduler.order", "decode_round_robin"),
        "scheduler.order=decode_round_robin",
    ),
    Condition("scheduler.default_deadline_s", _chosen("scheduler.order", "deadline"), "scheduler.order=deadline"),
    Condition(
        "scheduler.aging_s",
        _chosen("scheduler.order", "priority", "shortest_first", "longest_prefix"),
        "the orders priority, shortest_first and longest_prefix",
    ),
    Condition("kv.eviction", lambda config: config.kv.prefix_sharing, "kv.prefix_sharing=true"),
    Condition(
        "kv.offload_eviction", lambda config: bool(config.kv.offload or config.kv.offload_disk), "kv.offload"
    ),
    Condition("executor.timing", _is_simulated, "executor=simulated"),
    Condition("executor.timing_path", _is_simulated, "executor=simulated"),
    Condition("executor.memory_utilization", _is_simulated, "executor=simulated"),
    Condition("executor.recording", lambda config: config.executor.kind == "playback", "executor=playback"),
    Condition(
        "workload.rate",
        lambda config: config.workload.arrival not in ("burst", "trace"),
        "workload.arrival=poisson, uniform or gamma; all requests at once have no rate, and those of a trace have "
        "times (workload.rate_scale)",
    ),
    *(
        Condition(f"fleet.{name}", lambda config: config.fleet.replicas > 1, "fleet.replicas of 2 or more")
        for name in (
            "router",
            "load",
            "load_s",
            "prefixes",
            "events_ms",
            "events_lost",
            "memory_blocks",
            "life",
            "scale",
            "store",
            "neighbours",
        )
    ),
    *(
        Condition(f"fleet.{name}", lambda config: config.fleet.prefill > 0, "fleet.prefill of 1 or more")
        for name in ("split_tokens", "handshake", "prefill_scale")
    ),
    Condition(
        "fleet.link",
        lambda config: bool(config.fleet.prefill or config.fleet.store or config.fleet.neighbours),
        "fleet.prefill of 1 or more, fleet.store and fleet.neighbours",
    ),
    Condition("fleet.store_weight", lambda config: config.fleet.store is not None, "fleet.store"),
    Condition(
        "fleet.pull",
        lambda config: bool(config.fleet.store or config.fleet.neighbours),
        "fleet.store and fleet.neighbours",
    ),
    Condition(
        "fleet.weights", _chosen("fleet.router", "precise", "estimated", "load"), "the routers that add up scores"
    ),
    Condition("fleet.temperature", _chosen("fleet.router", "dynamo"), "fleet.router=dynamo"),
    Condition("workload.burstiness", lambda config: config.workload.arrival == "gamma", "workload.arrival=gamma"),
    Condition("workload.think_s", lambda config: config.workload.turns > 1, "workload.turns of 2 or more"),
    Condition("workload.zipf", lambda config: config.workload.num_groups > 1, "workload.num_groups of 2 or more"),
    Condition("workload.group_len", _is_synthetic, "synthetic workloads"),
    Condition("workload.system_len", _is_synthetic, "synthetic workloads"),
    Condition(
        "workload.block_tokens",
        lambda config: config.workload.source in ("mooncake", "timed_trace"),
        "the traces mooncake and timed_trace",
    ),
    Condition(
        "workload.path",
        _chosen("workload.source", *FILES),
        "workloads that read a file",
    ),
)


def without_effect(config: RunConfig) -> list[str]:
    """A sentence for each setting that has another value than its default, and that nothing of the run reads."""
    sentences = []
    for condition in CONDITIONS:
        group, name = condition.key.split(".")
        section: Any = getattr(config, group)
        value = getattr(section, name)
        field = next(field for field in fields(section) if field.name == name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default and not condition.is_read(config):
            sentences.append(f"{condition.key}={value} has no effect here: it is read by {condition.by}")
    return sentences
