"""Which settings a choice reads: what was set and has no effect is said."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from kvlab.config.run import RunConfig
from kvlab.config.workload import FILES
from kvlab.registry import registry
from kvlab.secrets import redacted

IsRead = Callable[[RunConfig], bool]
Reader = tuple[IsRead, str]  # the last fields of a Condition


class Condition(NamedTuple):
    """A setting that only some choices read."""

    key: str
    is_read: IsRead
    by: str  # what reads it, in words
    but: tuple[str, ...] = ()  # settings below the key that have a condition of their own


def _each(section: str, names: str, is_read: IsRead, by: str) -> Iterator[Condition]:
    """The same condition of several settings of a section."""
    return (Condition(f"{section}.{name}", is_read, by) for name in names.split())


def _chosen(key: str, *names: str) -> IsRead:
    """Whether one of these is chosen, or one that is not kvlab's own, which may read anything."""

    def is_read(config: RunConfig) -> bool:
        value = attrgetter(key)(config)
        return value in names or value not in registry(key).own_names()

    return is_read


def _named(key: str, name: str) -> Reader:
    """That this is chosen, and that in words."""
    return _chosen(key, name), f"{key}={name}"


def _is(key: str, value: str) -> Reader:
    """That a setting has this value, and that in words."""
    return lambda config: attrgetter(key)(config) == value, f"{key}={value}"


def _at_least(key: str, least: int) -> Reader:
    """That a number is so large, and that in words."""
    return lambda config: attrgetter(key)(config) >= least, f"{key} of {least} or more"


def _above_zero(key: str) -> Reader:
    """That a number is not 0, and that in words."""
    return lambda config: attrgetter(key)(config) > 0, f"{key} of more than 0"


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


def _loads(config: RunConfig) -> bool:
    return config.executor.kind != "simulated" or _is_other(config)


def _reads_words(config: RunConfig) -> bool:
    return _loads(config) or config.workload.source != "synthetic"


def _samples_at_start(config: RunConfig) -> bool:
    has_sampler = _is_simulated(config) and (config.hardware is None or config.hardware.cuda)
    version = config.framework.vllm_key if has_sampler and config.framework.tables == "vllm" else None
    return version is not None and not (0, 28) <= version < (0, 33)


def _is_synthetic(config: RunConfig) -> bool:
    return _chosen("workload.source", "synthetic")(config)


def _has_arrivals(config: RunConfig) -> bool:
    return config.workload.source != "jsonl"


def _pins(config: RunConfig) -> bool:
    return config.workload.pin_prefix or not _chosen("workload.source", "synthetic", "chat")(config)


def _is_own(config: RunConfig) -> bool:
    return config.engine.kind == "kvlab" or config.hardware is not None  # whose server's defaults nobody typed


def _is_started(config: RunConfig) -> bool:
    return config.engine.kind != "openai" or config.hardware is not None


def _is_other(config: RunConfig) -> bool:
    return config.engine.kind != "kvlab"


_is_process = _chosen("engine.kind", "vllm", "llamacpp", "transformers_continuous", "transformers_static")
_asks_server = _chosen("engine.kind", "openai")
#: Of kvlab's own engine, what engines in processes of their own are told too, and what says where it runs.
_TOLD = {
    "kv": "backend block_size num_blocks memory prefix_sharing",
    "scheduler": "policy max_batch_size max_batched_tokens max_wait_ms reserve_output",  # static brings the last
    "executor": "device dtype threads",
    "attention": "",
}
_OF_SERVERS = "name version cuda_graphs eager_layer_us"  # of simulated ones alone

#: The settings that not every choice reads, beside those that their own checks refuse. The page of all settings has
#: them as a table.
CONDITIONS = (
    *(Condition(key, _is_own, "engine=kvlab", tuple(names.split())) for key, names in _TOLD.items()),
    *(each for told in _TOLD.items() for each in _each(*told, _is_started, "engines that a run starts")),
    *_each("engine", "url model api_key extensions max_in_flight metrics_s", _asks_server, "engine=openai"),
    *_each("engine", "python start_timeout_s", _is_process, "engines in a process of their own, as engine=vllm"),
    *_each("engine", "timeout_s version options", _is_other, "other engines than kvlab"),
    Condition("scheduler.max_wait_ms",
              lambda run: run.scheduler.policy == "static" or run.engine.kind == "transformers_static",
              "scheduler=static"),
    Condition("scheduler.max_decode_seqs", *_named("scheduler.order", "decode_round_robin")),
    Condition("scheduler.default_deadline_s", *_named("scheduler.order", "deadline")),
    Condition("scheduler.aging_s", _chosen("scheduler.order", "priority", "shortest_first", "longest_prefix"),
              "the orders priority, shortest_first and longest_prefix"),
    Condition("scheduler.reserve_prompt", lambda run: not run.scheduler.reserves_output,
              "schedulers that do not reserve whole answers (scheduler.reserve_output=false)"),
    Condition("scheduler.prefill_wait_tokens", *_at_least("scheduler.prefill_wait_steps", 1)),
    *_each("scheduler.speculation", "num_speculative_tokens prompt_lookup_min prompt_lookup_max",
           lambda run: run.scheduler.speculation.method is not None,
           "scheduler.speculation.method=ngram"),
    *_each("kv", "eviction partial_reuse merge_equal", lambda run: run.kv.prefix_sharing, "kv.prefix_sharing=true"),
    Condition("kv.pinned_share", _pins, "workload.pin_prefix=true, and pin_tokens of workload=jsonl"),
    Condition("kv.pin_ttl_s", *_above_zero("kv.pinned_share")),
    Condition("workload.pin_prefix", *_above_zero("kv.pinned_share")),
    Condition("kv.quota", lambda run: run.workload.salt_groups or not _is_synthetic(run),
              "workload.salt_groups=true, and the salts of workload=jsonl"),
    Condition("kv.offload_eviction", lambda run: bool(run.kv.offload or run.kv.offload_disk), "kv.offload"),
    Condition("executor.timing", _is_simulated, "executor=simulated"),
    Condition("executor.timing_path", _chosen("executor.timing", "fitted"),
              "executor=simulated executor.timing=fitted"),
    *_each("framework", _OF_SERVERS, _is_simulated, "simulated devices, as hardware=h100_sxm"),
    Condition("framework.eager_layer_us", lambda run: not run.framework.cuda_graphs, "framework.cuda_graphs=false"),
    Condition("framework.flashinfer_sampler", _samples_at_start,
              "simulated devices of NVIDIA with a vLLM before 0.28, or from 0.33 on (framework.version)"),
    *_each("executor", "device threads", _loads, "executors that compute"),
    # Unless others are set they are its checkpoint's own.
    Condition("model.weights", lambda run: _reads_words(run) or run.model.weights == run.model.path,
              "executors that compute"),
    Condition("model.tokenizer", _reads_words, "executors that compute, and workloads of words, as workload=chat"),
    Condition("executor.memory_utilization", _is_simulated, "executor=simulated"),
    Condition("attention.prefer", *_is("attention.backend", "auto")),
    Condition("executor.recording", lambda config: config.executor.kind == "playback", "executor=playback"),
    Condition("workload.arrival", _has_arrivals, "workloads other than jsonl, whose lines have arrival_s"),
    Condition("workload.rate", lambda run: _has_arrivals(run) and run.workload.arrival not in ("burst", "trace"),
              "workload.arrival=poisson, uniform or gamma; all requests at once have no rate, and those of a trace "
              "have times (workload.rate_scale)"),
    *_each("fleet", "router life store neighbours", *_at_least("fleet.replicas", 2)),
    Condition("fleet.load", _sees_load, f"the routers {', '.join(_OF_LOAD)} of 2 replicas or more"),
    Condition("fleet.load_s", lambda run: _sees_load(run) and run.fleet.fed_by("load") == "polled",
              "a router whose view of load is polled (fleet.load)"),
    Condition("fleet.prefixes", _sees_prefixes, f"the routers {', '.join(_OF_PREFIXES)} of 2 replicas or more"),
    *_each("fleet", "events_ms events_lost",
           lambda run: _sees_prefixes(run) and run.fleet.fed_by("prefixes") == "events",
           "a router that learns prefixes from events (fleet.prefixes)"),
    Condition("fleet.memory_blocks", lambda run: _sees_prefixes(run) and run.fleet.fed_by("prefixes") == "memory",
              "a router that remembers what it sent (fleet.prefixes)"),
    Condition("fleet.scale", lambda run: run.fleet.replicas > 1 and run.fleet.scale.on is not None,
              "fleet.scale.on, with fleet.replicas of 2 or more"),
    *_each("fleet", "split_tokens handshake", *_at_least("fleet.prefill", 1)),
    Condition("fleet.prefill_scale", lambda run: run.fleet.prefill > 0 and run.fleet.prefill_scale.on is not None,
              "fleet.prefill_scale.on, with fleet.prefill of 1 or more"),
    Condition("fleet.link", lambda run: run.fleet.uses_link,
              "fleet.prefill of 1 or more, fleet.store and fleet.neighbours"),
    Condition("fleet.store_weight",
              lambda run: run.fleet.store is not None and _sees_prefixes(run)
              and run.fleet.fed_by("prefixes") != "none",
              "fleet.store, with a router that sees prefixes"),
    Condition("fleet.pull", lambda run: bool(run.fleet.store or run.fleet.neighbours),
              "fleet.store and fleet.neighbours"),
    Condition("fleet.weights", _chosen("fleet.router", "precise", "estimated", "load"),
              "the routers that add up scores"),
    Condition("fleet.weights.prefix", lambda run: run.fleet.fed_by("prefixes") != "none",
              "a router that sees prefixes: precise, estimated, or load with fleet.prefixes"),
    Condition("fleet.temperature", *_named("fleet.router", "dynamo")),
    Condition("workload.burstiness", *_is("workload.arrival", "gamma")),
    Condition("workload.think_s", *_at_least("workload.turns", 2)),
    Condition("workload.zipf", *_at_least("workload.num_groups", 2)),
    Condition("workload.num_groups", lambda run: run.workload.group_len > 0 or run.workload.salt_groups,
              "workload.group_len of 1 or more, or workload.salt_groups=true"),
    *_each("workload", "prompt_len system_len group_len num_groups salt_groups pin_prefix zipf turns priorities",
           _is_synthetic,
           "synthetic workloads"),
    Condition("workload.num_requests", lambda run: run.workload.source not in FILES,
              "synthetic workloads and chat; of a trace workload.window and workload.sample take a part"),
    Condition("workload.output_len", _chosen("workload.source", "synthetic", "chat", "recorded"),
              "synthetic workloads, chat and recorded"),
    *_each("workload.prompt_len", "median sigma", *_is("workload.prompt_len.distribution", "lognormal")),
    *_each("workload.output_len", "median sigma", *_is("workload.output_len.distribution", "lognormal")),
    Condition("workload.priorities",
              lambda run: not _is_own(run) or _chosen("scheduler.order", "priority")(run)
              or run.scheduler.preemption.victim not in (None, "last_admitted", "fewest_generated"),
              "scheduler.order=priority and scheduler.preemption.victim=priority"),
    # Several samples of a prompt need one, and equal ones are what they would be without.
    Condition("workload.temperature",
              lambda run: not _is_simulated(run) or run.workload.samples > 1
              or _chosen("workload.source", "jsonl")(run),
              "executors that compute; simulated ones draw tokens of their own"),
    # A chat has it from its file.
    Condition("workload.ignore_eos", lambda run: not _is_simulated(run) or run.workload.source == "chat",
              "executors that compute; simulated ones never draw an end of sequence"),
    *_each("debug.faults", "kind seed", *_above_zero("debug.faults.rate")),
    *_each("tracking", "uri experiment artifacts timeout_s system_metrics",
           lambda run: run.tracking.backend != "off",
           "tracking=mlflow"),
    Condition("workload.block_tokens", lambda run: run.workload.source in ("mooncake", "timed_trace"),
              "the traces mooncake and timed_trace"),
    Condition("workload.path", _chosen("workload.source", *FILES), "workloads that read a file"),
)  # fmt: skip


def without_effect(config: RunConfig) -> list[str]:
    """A sentence for each setting that has another value than its default, and that nothing of the run reads."""
    sentences = dict[str, str]()
    for condition in CONDITIONS:
        if condition.is_read(config):
            continue
        owner, _, name = condition.key.rpartition(".")
        for key, value in _set(attrgetter(owner)(config) if owner else config, name, condition.key):
            if key.removeprefix(f"{condition.key}.") in condition.but:
                continue
            text = f"{key}={redacted(key, value)} has no effect here: it is read by {condition.by}"
            sentences.setdefault(key, text)
    return list(sentences.values())


def _set(section: Any, name: str, key: str) -> Iterator[tuple[str, object]]:
    """What was set of a section's value, by key: of one that has settings of its own each of these."""
    value = getattr(section, name)
    if is_dataclass(value):
        for field in fields(value):
            yield from _set(value, field.name, f"{key}.{field.name}")
    elif value != getattr(type(section)(), name):
        yield key, value
