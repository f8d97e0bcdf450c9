"""Which settings a choice reads: what was set and has no effect is said."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
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


#: Routers that look at replicas' queues and memory, and at their prefix caches.
_OF_LOAD = ("vllm", "precise", "estimated", "load", "sticky", "dynamo", "oracle")
_OF_PREFIXES = ("cache_aware", "precise", "estimated", "sticky", "dynamo", "oracle")


def _sees_load(config: RunConfig) -> bool:
    return config.fleet.replicas > 1 and _chosen("fleet.router", *_OF_LOAD)(config)


def _sees_prefixes(config: RunConfig) -> bool:
    adds = config.fleet.router == "load" and config.fleet.weights.prefix is not None
    return config.fleet.replicas > 1 and (adds or _chosen("fleet.router", *_OF_PREFIXES)(config))


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
    Condition(
        "scheduler.reserve_prompt",
        lambda config: not config.scheduler.reserves_output,
        "schedulers that do not reserve whole answers (scheduler.reserve_output=false)",
    ),
    Condition("kv.eviction", lambda config: config.kv.prefix_sharing, "kv.prefix_sharing=true"),
    Condition(
        "kv.offload_eviction", lambda config: bool(config.kv.offload or config.kv.offload_disk), "kv.offload"
    ),
    Condition("executor.timing", _is_simulated, "executor=simulated"),
    Condition(
        "executor.timing_path", _chosen("executor.timing", "fitted"), "executor=simulated executor.timing=fitted"
    ),
    *(
        Condition(f"framework.{name}", _is_simulated, "simulated devices, as hardware=h100_sxm")
        for name in ("name", "version")
    ),
    Condition("executor.threads", lambda config: not _is_simulated(config), "executors that compute"),
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
        for name in ("router", "life", "store", "neighbours")
    ),
    Condition("fleet.load", _sees_load, f"the routers {', '.join(_OF_LOAD)} of 2 replicas or more"),
    Condition(
        "fleet.load_s",
        lambda config: _sees_load(config) and config.fleet.fed_by("load") == "polled",
        "a router whose view of load is polled (fleet.load)",
    ),
    Condition("fleet.prefixes", _sees_prefixes, f"the routers {', '.join(_OF_PREFIXES)} of 2 replicas or more"),
    *(
        Condition(
            f"fleet.{name}",
            lambda config: _sees_prefixes(config) and config.fleet.fed_by("prefixes") == "events",
            "a router that learns prefixes from events (fleet.prefixes)",
        )
        for name in ("events_ms", "events_lost")
    ),
    Condition(
        "fleet.memory_blocks",
        lambda config: _sees_prefixes(config) and config.fleet.fed_by("prefixes") == "memory",
        "a router that remembers what it sent (fleet.prefixes)",
    ),
    Condition(
        "fleet.scale",
        lambda config: config.fleet.replicas > 1 and config.fleet.scale.on is not None,
        "fleet.scale.on, with fleet.replicas of 2 or more",
    ),
    *(
        Condition(f"fleet.{name}", lambda config: config.fleet.prefill > 0, "fleet.prefill of 1 or more")
        for name in ("split_tokens", "handshake")
    ),
    Condition(
        "fleet.prefill_scale",
        lambda config: config.fleet.prefill > 0 and config.fleet.prefill_scale.on is not None,
        "fleet.prefill_scale.on, with fleet.prefill of 1 or more",
    ),
    Condition(
        "fleet.link",
        lambda config: config.fleet.uses_link,
        "fleet.prefill of 1 or more, fleet.store and fleet.neighbours",
    ),
    Condition(
        "fleet.store_weight",
        lambda config: (
            config.fleet.store is not None and _sees_prefixes(config) and config.fleet.fed_by("prefixes") != "none"
        ),
        "fleet.store, with a router that sees prefixes",
    ),
    Condition(
        "fleet.pull",
        lambda config: bool(config.fleet.store or config.fleet.neighbours),
        "fleet.store and fleet.neighbours",
    ),
    Condition(
        "fleet.weights", _chosen("fleet.router", "precise", "estimated", "load"), "the routers that add up scores"
    ),
    Condition(
        "fleet.weights.prefix",
        lambda config: config.fleet.fed_by("prefixes") != "none",
        "a router that sees prefixes: precise, estimated, or load with fleet.prefixes",
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
    sentences = dict[str, str]()
    for condition in CONDITIONS:
        if condition.is_read(config):
            continue
        section: Any = config
        *groups, name = condition.key.split(".")
        for group in groups:
            section = getattr(section, group)
        for key, value in _set(section, name, condition.key):
            sentences.setdefault(key, f"{key}={value} has no effect here: it is read by {condition.by}")
    return list(sentences.values())


def _set(section: Any, name: str, key: str) -> Iterator[tuple[str, object]]:
    """What was set of a section's value, by key: of one that has settings of its own each of these."""
    value = getattr(section, name)
    if is_dataclass(value):
        for field in fields(value):
            yield from _set(value, field.name, f"{key}.{field.name}")
    elif value != getattr(type(section)(), name):
        yield key, value
