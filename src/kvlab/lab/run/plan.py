"""From a configuration to a run: an engine that is sound, requests it can serve, memory that the machine has."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from kvlab.config import RunConfig, format_bytes, parse_bytes
from kvlab.config.groups import of_group, with_settings
from kvlab.config.workload import FILES
from kvlab.core import Request
from kvlab.engine.build import plan_engine
from kvlab.engine.plan import EnginePlan
from kvlab.errors import CapacityError, ConfigError, KvlabError
from kvlab.kv.sizing import check_longest_sequence
from kvlab.lab.capacity import sequences_that_fit
from kvlab.lab.machine import available_memory, describe
from kvlab.lab.run.fleet import check_blocks, check_fleet
from kvlab.lab.run.requests import check_lengths, requests_of
from kvlab.models.tokenizer import Tokenizer, find_tokenizer
from kvlab.workloads import may_sample
from kvlab.workloads.prompts import grown_lengths

_LIBRARIES = 256 * 2**20  # for tracking and pictures, which a run loads into main memory behind the check


@dataclass(frozen=True, slots=True)
class RunPlan(EnginePlan):
    """A checked run: its engine, and the requests it will serve. Of a fleet of unequal `groups` the engine is
    that of the first.
    """

    config: RunConfig
    requests: list[Request]
    tokenizer: Tokenizer | None = None  # of the model's checkpoint, where it has one and tokens mean something
    groups: tuple[PlannedGroup, ...] = ()

    @property
    def own(self) -> RunPlan:
        """Itself: the plan of an engine that is kvlab's own."""
        return self

    @property
    def parts(self) -> tuple[PlannedGroup, ...]:
        """Its replicas by group: one group of all of them where they are equal."""
        return self.groups or (PlannedGroup("", range(self.config.fleet.replicas), self),)

    @property
    def replicas(self) -> list[RunPlan]:
        """The plan of each replica, in the order of their numbers."""
        return [group.plan for group in self.parts for _ in group.replicas]

    @property
    def chosen(self) -> dict[str, str | int]:
        """See EnginePlan; of groups, how the steps of each are timed."""
        own = super(RunPlan, self).chosen
        if self.groups and not self.is_real:
            own["timing"] = " and ".join(dict.fromkeys(str(group.plan.chosen["timing"]) for group in self.groups))
        return own

    @property
    def machine(self) -> str:
        """What it runs on, in words."""
        if self.is_real:
            return describe(self.device) + self._fleet
        timing = self.chosen["timing"]
        return (
            str(timing) if self.recording is not None else f"simulated {self.device}, timing {timing}{self._fleet}"
        )

    @property
    def _fleet(self) -> str:
        fleet = self.config.fleet
        return f", {fleet.replicas} replicas behind {fleet.router}" if fleet.replicas > 1 else ""


class PlannedGroup(NamedTuple):
    """So many replicas of one plan, whose configuration has the group's settings."""

    name: str
    replicas: range  # their numbers
    plan: RunPlan


def plan_run(config: RunConfig, requests: list[Request] | None = None) -> RunPlan:
    """Check a configuration of kvlab's own engine as a whole, with the requests of its workload or with others.

    Raises a KvlabError for what cannot work: CapacityError for what does not fit in the pool or the machine,
    WorkloadError for a request that is too long, TokenizerError for text without a tokenizer, ConfigError,
    BackendError, DeviceError.
    """
    groups = list[PlannedGroup]()
    for each in config.fleet.parts:
        try:
            own = _plan(with_settings(config, each.settings), requests)
        except KvlabError as error:
            raise of_group(error, each.name) from error
        requests = own.requests
        first = groups[-1].replicas.stop if groups else 0
        groups.append(PlannedGroup(each.name, range(first, first + each.replicas), own))
    if groups:
        plan = replace(groups[0].plan, config=config, groups=tuple(groups))
        if not plan.is_real:
            plan = replace(plan, device=" and ".join(f"{len(group.replicas)} of {group.name}" for group in groups))
    else:
        plan = _plan(config, requests)
    check_blocks(plan.replicas, config.fleet)
    every = sum(replica.weights.total + replica.pool.num_bytes for replica in plan.replicas)
    for group in plan.parts:
        own = group.plan
        try:
            # Those that are simulated have memory of their own.
            _check_memory(own, every - own.weights.total - own.pool.num_bytes if own.is_real else 0)
        except CapacityError as error:
            raise of_group(error, group.name) from error
    return plan


def _plan(config: RunConfig, requests: list[Request] | None) -> RunPlan:
    """The plan of replicas that are all alike, without their memory."""
    plan = plan_engine(config, random_sampling=may_sample(config.workload))
    if config.fleet.replicas > 1 and (plan.recording is not None or config.debug.profile):
        key = "debug.profile=true" if config.debug.profile else "executor=playback"
        raise ConfigError("fleet.replicas", config.fleet.replicas, f"{key} looks into one engine; leave it at 1")
    check_fleet(plan, config.fleet)
    if config.debug.profile and plan.kernels is None:
        raise ConfigError("debug.profile", True, f"executor.kind={config.executor.kind} has no parts to be timed")
    if config.debug.profile and plan.is_real and (ranks := config.executor.tensor_parallel) > 1:
        text = f"times the parts of one process, and executor.tensor_parallel={ranks} has several; leave it out"
        raise ConfigError("debug.profile", True, text)
    if requests is None:
        requests = requests_of(config)
    longest = check_lengths(
        requests, config.workload.name, config.model.max_seq_len, plan.model.max_position_embeddings
    )
    room = None if plan.memory is None else plan.memory - plan.weights.total - plan.working.peak
    check_longest_sequence(plan.pool, longest, room)
    has_words = plan.kernels is not None and config.model.weights != "dummy"
    tokenizer = find_tokenizer(config.model) if has_words else None
    parts = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return RunPlan(**parts, requests=requests, tokenizer=tokenizer)


def planned_metrics(plan: RunPlan) -> dict[str, float]:
    """The planner's figures for a run's sequences, each at the length that it takes memory for, of its own. Where
    groups differ in that, the mean length is that of the run's own settings.
    """
    lengths = _lengths(plan, plan.requests)
    fit = sum(
        len(group.replicas) * sequences_that_fit(group.plan.pool, _stored(group.plan, plan.requests))
        for group in plan.parts
    )
    batch = sum(replica.config.scheduler.max_batch_size for replica in plan.replicas)
    return {
        "capacity/mean_length": sum(lengths) / len(lengths),
        "capacity/planned_sequences": fit,
        "capacity/planned_running": min(fit, batch, len(lengths)),
        "capacity/weight_bytes": sum(replica.weights.total for replica in plan.replicas),
        "capacity/working_bytes": plan.working.peak,
    }


def _lengths(plan: EnginePlan, requests: list[Request]) -> list[int]:
    """Tokens that an engine keeps memory for, of each sequence of these requests."""
    grown, scheduler = grown_lengths(requests), plan.config.scheduler
    if scheduler.reserves_output and scheduler.conservativeness is None:
        for request in requests:
            grown[request.request_id] += request.sampling.max_tokens - request.expected_tokens
    most = min(plan.config.model.max_seq_len, plan.pool.num_blocks * plan.pool.block_size)
    return [min(grown[each.request_id], most) for each in requests for _ in range(each.sampling.n)]


def _stored(plan: EnginePlan, requests: list[Request]) -> list[int]:
    """Of these the tokens whose K and V are stored at the end: all but the last, which nobody computes. For that
    TensorRT-LLM keeps room, too.
    """
    scheduler = plan.config.scheduler
    has_last = scheduler.reserves_output and scheduler.chunk_unit is not None
    return [length if has_last else length - 1 for length in _lengths(plan, requests)]


def asked_note(plan: RunPlan) -> str | None:
    """What memory is kept for, where that goes by what clients asked for, and a trace does not tell it."""
    source = plan.config.workload.source
    if source not in FILES or source == "jsonl":
        return None
    if not any(part.plan.config.scheduler.reserves_output for part in plan.parts):
        return None
    unknown = sum(request.output_tokens is None for request in plan.requests)
    if not unknown:
        return None
    text = "scheduler.reserve_output keeps memory for the outputs that requests had"
    those = "" if unknown == len(plan.requests) else f" of {unknown:,} of {len(plan.requests):,}"
    return f"{text}{those}: what their clients asked for is not known; workload.max_tokens=N says it"


def _check_offload(plan: EnginePlan, left: int) -> None:
    """Raise CapacityError unless what is `left` of main memory holds `kv.offload`. A simulated host does."""
    asked = plan.config.kv.offload
    if asked is None or plan.kernels is None or parse_bytes(asked, key="kv.offload") <= left:
        return
    fits = f"kv.offload={left // 2**20}MiB would fit" if left >= 2**20 else "leave it null"
    raise CapacityError(
        f"kv.offload={asked}: beside the run's weights, cache and steps main memory has "
        f"{format_bytes(max(left, 0))} available; {fits}"
    )


def _check_memory(plan: EnginePlan, others: int) -> None:
    """Raise CapacityError unless the device has memory for weights, cache and steps, or for loading the weights,
    beside the bytes of `others` there.
    """
    if plan.recording is not None:  # nothing is allocated
        return
    config, pool, working, device = plan.config, plan.pool, plan.working, plan.device
    available = available_memory(device) if plan.memory is None else plan.memory
    weights = plan.weights.total
    steps = working.peak + (_LIBRARIES if device == "cpu" else 0)
    needed = others + weights + max(pool.num_bytes + steps, working.loading)
    if needed <= available:
        _check_offload(plan, available - needed if device == "cpu" else available_memory("cpu"))
        return
    left = available - others - weights - steps
    if weights + working.loading > available or left < pool.block_size * pool.bytes_per_slot:
        advice = "no KV cache fits beside these weights: take a smaller model"
        if config.executor.dtype == "float32":
            advice += " or executor.dtype=bfloat16"
    else:
        advice = f"kv.memory={left // 2**10}KiB" if left < 2**20 else f"kv.memory={left // 2**20}MiB"
        advice += " would fit"
    raise CapacityError(
        f"the run needs {format_bytes(needed)} ({config.model.name} weights "
        f"{format_bytes(weights)}, KV cache {format_bytes(pool.num_bytes)}, working memory "
        f"{format_bytes(steps)}) and {device} has {format_bytes(available)} available; {advice}"
    )
