"""The changes that may help: of each kind a few values beside today's."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from kvlab.config import RunConfig, SchedulerConfig
from kvlab.kv.pools import POOLS
from kvlab.lab.advise.parts import Part, devices_of, of_part, parts_of, setting_of
from kvlab.lab.advise.simulations import Settings
from kvlab.lab.capacity import compared_backends
from kvlab.lab.settings import as_word
from kvlab.planning.devices import usual_server
from kvlab.planning.startup import startup

_BLOCK, _BLOCKS = "kv.block_size", "kv.num_blocks"
_MOST_TOKENS = 65_536
_LARGEST = 64  # tokens of a block that is tried
_QUALITY = "quality: {} more perplexity (experiments/precision)"
_NETWORK = "a network between replicas (fleet.link)"


class Price(IntEnum):
    """What a change costs, the least first."""

    NOTHING = 0
    HOST = 1  # memory of the host, or a network between replicas
    QUALITY = 2
    DEVICES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Other values of settings. Of one `kind` a plan has one change."""

    kind: str
    settings: Settings
    price: Price = Price.NOTHING
    cost: str = "nothing"

    @property
    def keys(self) -> set[str]:
        """What it sets; of a group also as it is called without groups."""
        return {*self.settings, *(setting_of(key) for key in self.settings)}

    @property
    def text(self) -> str:
        """As settings of kvlab run."""
        return " ".join(as_word(key, value) for key, value in self.settings.items())


@dataclass(frozen=True, slots=True)
class TrafficFacts:
    """What decides which changes make sense, of the traffic and of the ledger's replay."""

    shares: bool  # prompts begin alike
    misses: bool  # a larger pool would find more
    preempts: bool  # sequences gave up their memory
    best_eviction: str | None  # the policy that finds most in a pool of today's size, if not today's
    salts: int
    pins: bool
    most_running: int  # sequences at once, of all replicas
    asks_more: bool = False  # requests ask for more tokens than they produce


def possible_changes(config: RunConfig, facts: TrafficFacts, devices: int) -> list[Change]:
    """The changes to today's settings that are worth a simulation, on at most so many devices. Those that turn out
    not to fit are left to the simulation to refuse. Of unequal groups there may be more or fewer replicas, each may
    have other steps, and all that have none of their own other values of the rest.
    """
    if parts := parts_of(config):
        found = [_recount(parts, counts) for counts in _counts(parts, devices)]
        found += [change for number, part in enumerate(parts) for change in _of_part(number, part, facts)]
        shared = (*_pool(config, facts), *_order(config.scheduler, facts))
        found += [changed for change in shared for changed in _of_others(change, parts)]
    else:
        found = [
            *_layouts(config, devices),
            *_steps(config.scheduler, facts),
            *_pool(config, facts),
            *_order(config.scheduler, facts),
        ]
    found += _fleet(config, facts)
    return list({change.text: change for change in found}.values())


def layouts_of(config: RunConfig, total: int) -> Iterator[Change]:
    """Every way to have so many devices: replicas, and the devices of each."""
    today = devices_of(config)
    cost, price = f"{total - today} more of {total} devices", Price.DEVICES
    if total <= today:
        cost, price = "nothing" if total == today else f"saves {today - total} of {today} devices", Price.NOTHING
    for parallel in (1, 2, 4, 8, 16):
        replicas, rest = divmod(total, parallel * config.executor.attention_data_parallel)
        if replicas and not rest:
            settings = {"fleet.replicas": replicas, "executor.tensor_parallel": parallel}
            if config.fleet.prefill >= replicas:
                settings["fleet.prefill"] = 0
            yield Change("devices", settings, price, cost)


def _counts(parts: Sequence[Part], devices: int) -> Iterator[dict[int, int]]:
    """How many replicas more each group may have, by its number: of one group one more, one less, and as many as
    fit; one or half of it for as many devices of another, which may take those that are free too; and as many times
    all as fit.
    """
    today = sum(part.replicas * part.devices for part in parts)
    free = devices - today
    for number, part in enumerate(parts):
        room = free // part.devices
        yield from ({number: more} for more in sorted({1, room}) if 0 < more <= room)
        if part.replicas > 1:
            yield {number: -1}
        for other, gets in enumerate(parts):
            shared = math.lcm(part.devices, gets.devices)
            most = (part.replicas - 1) // (shared // part.devices)
            for times in sorted({1, (most + 1) // 2}) if most and other != number else ():
                for more in sorted({0, free // gets.devices}):
                    yield {number: -times * shared // part.devices, other: times * shared // gets.devices + more}
    if (times := devices // today) > 1:
        yield {number: (times - 1) * part.replicas for number, part in enumerate(parts)}


def _recount(parts: Sequence[Part], more: Mapping[int, int]) -> Change:
    """So many replicas more of each group, by its number."""
    hardware = Counter[str]()
    for number, count in more.items():
        hardware[parts[number].hardware] += count * parts[number].devices
    words = [f"{abs(count)} {'more' if count > 0 else 'less'} of {parts[at].name}" for at, count in more.items()]
    counts = dict[str, Any]()
    for at, count in sorted(more.items()):
        counts |= of_part(at, {"count": parts[at].replicas + count})
    price = Price.DEVICES if max(hardware.values()) > 0 else Price.NOTHING
    return Change("replicas of groups", counts, price, ", ".join(words))


def _of_part(number: int, part: Part, facts: TrafficFacts) -> Iterator[Change]:
    """Other steps of one group's replicas."""
    for change in _steps(part.scheduler, facts):
        kind = f"{change.kind}, fleet.groups.{number}"
        yield replace(change, kind=kind, settings=of_part(number, change.settings), cost=f"nothing ({part.name})")


def _of_others(change: Change, parts: Sequence[Part]) -> Iterator[Change]:
    """A change of the run's settings, which groups that have their own keep; nothing where one has some of them."""
    keys = set(change.settings)
    if (size := change.settings.get(_BLOCK)) is not None:
        change, keys = replace(change, settings={**change.settings, **_in_blocks(parts, size)}), {_BLOCK}
    others = [part.name for part in parts if not part.own & keys]
    if len(others) == len(parts):
        yield change
    elif others and all(part.own >= keys for part in parts if part.name not in others):
        yield replace(change, cost=f"{change.cost} (of {', '.join(others)} alone)")


def _in_blocks(parts: Sequence[Part], size: int) -> dict[str, Any]:
    """The number of blocks of each group that has it or their size of its own, so that it keeps its memory where
    the run has blocks of `size` tokens.
    """
    found = dict[str, Any]()
    for number, part in enumerate(parts):
        own = part.own & {_BLOCK, _BLOCKS}
        if len(own) == 1 and part.kv.num_blocks is not None:
            tokens = part.kv.num_blocks * part.kv.block_size
            found |= of_part(number, {_BLOCKS: tokens // (part.kv.block_size if _BLOCK in own else size)})
    return found


def _layouts(config: RunConfig, devices: int) -> Iterator[Change]:
    today = devices_of(config)
    layout = {"fleet.replicas": config.fleet.replicas, "executor.tensor_parallel": config.executor.tensor_parallel}
    for total in dict.fromkeys((today, min(2 * today, devices), devices, today // 2)):
        yield from (change for change in layouts_of(config, total) if change.settings != layout)


def _steps(scheduler: SchedulerConfig, facts: TrafficFacts) -> Iterator[Change]:
    """Tokens and sequences of a step. More sequences than ever ran at once change nothing."""
    tokens, batch = scheduler.max_batched_tokens, scheduler.max_batch_size
    for value in (2 * tokens, 4 * tokens, tokens // 2, tokens // 4):
        if batch <= value <= _MOST_TOKENS:
            yield Change("tokens of a step", {"scheduler.max_batched_tokens": value})
    for value in (2 * batch, 4 * batch, 8 * batch, batch // 2, batch // 4):
        if value >= 1 and (value < batch or facts.most_running >= batch):
            settings = {"scheduler.max_batch_size": value}
            if value > tokens:
                settings["scheduler.max_batched_tokens"] = value
            yield Change("sequences of a step", settings)
    longest = scheduler.long_prefill_threshold
    for most in (None, tokens // 2, tokens // 8):
        if most != longest and (most is None or most >= 64):
            yield Change("tokens of one prompt in a step", {"scheduler.long_prefill_threshold": most})


def _pool(config: RunConfig, facts: TrafficFacts) -> Iterator[Change]:
    kv, executor = config.kv, config.executor
    paged = POOLS.get(kv.backend).is_paged()
    if not paged:
        yield Change("memory in blocks", {"kv.backend": compared_backends()[0]})
    if kv.num_blocks is not None or kv.memory is not None:
        yield Change("size of the pool", {_BLOCKS: None, "kv.memory": None}, cost="all that weights leave")
    elif executor.memory_utilization < 0.95 and startup(config.framework).profiled:  # else steps need the rest
        share = {"executor.memory_utilization": 0.95}
        yield Change("size of the pool", share, cost="less memory left for other programs")
    if kv.dtype == "auto":
        yield Change("type of K and V", {"kv.dtype": "fp8_e4m3"}, Price.QUALITY, _QUALITY.format("0.6 %"))
        yield Change("type of K and V", {"kv.dtype": "int8"}, Price.QUALITY, _QUALITY.format("less than 0.1 %"))
    if executor.weights in ("auto", "plain"):
        has_fp4 = config.hardware is not None and "fp4" in config.hardware.tflops
        for weights in ("fp8", *(["nvfp4"] if has_fp4 else [])):
            yield Change(
                "type of weights", {"executor.weights": weights}, Price.QUALITY, "quality: not measured here"
            )
    if not kv.windows:
        yield Change("windows", {"kv.windows": True})
    if not paged or (not kv.prefix_sharing and not facts.shares):
        return
    if not kv.prefix_sharing:
        yield Change("prefix cache", {"kv.prefix_sharing": True})
    if not facts.shares:
        return
    usual = usual_server(config)
    least = usual.block_size if usual and usual.block_size > _LARGEST else 0  # that holds a state
    for size in (16, 32, _LARGEST):
        if size != kv.block_size and size >= least:
            blocks = {} if kv.num_blocks is None else {_BLOCKS: kv.num_blocks * kv.block_size // size}
            yield Change("block size", {_BLOCK: size} | blocks)
    if facts.best_eviction is not None:
        yield Change("eviction", {"kv.eviction": facts.best_eviction})
    if facts.misses:
        for room in ("64GiB", "256GiB"):
            if kv.offload != room:
                text = f"{room} of host memory for each replica"
                yield Change("host memory", {"kv.offload": room}, Price.HOST, text)
    if facts.pins and not kv.pinned_share:
        yield Change("pins", {"kv.pinned_share": 0.3})
    if facts.salts > 1 and kv.quota is None:
        yield Change("quotas", {"kv.quota": round(min(0.5, 2 / facts.salts), 3)})


def _order(scheduler: SchedulerConfig, facts: TrafficFacts) -> Iterator[Change]:
    if scheduler.policy == "static":
        yield Change("batching", {"scheduler.policy": "continuous"})
        return
    for order in ("fcfs", "shortest_first", *(["longest_prefix"] if facts.shares else [])):
        if order != scheduler.order:
            yield Change("order", {"scheduler.order": order}, cost="fairness" if order != "fcfs" else "nothing")
    if facts.preempts and not scheduler.reserves_prompt:
        yield Change("whole prompts", {"scheduler.reserve_prompt": True})
    if facts.preempts and not scheduler.reserves_output and scheduler.on_exhaustion != "fail":
        yield Change("admission", {"scheduler.reserve_output": True})
        if scheduler.preemption.mode != "swap":
            swap = {"scheduler.preemption.mode": "swap", "kv.offload": "64GiB"}
            yield Change("preemption", swap, Price.HOST, "64GiB of host memory for each replica")
    if facts.asks_more and scheduler.conservativeness is not None:
        for value in (0.3, 1.3):
            if value != scheduler.conservativeness:
                yield Change("admission", {"scheduler.conservativeness": value})
    elif facts.asks_more and scheduler.reserves_output:
        yield Change("admission", {"scheduler.reserve_output": False})


def _fleet(config: RunConfig, facts: TrafficFacts) -> Iterator[Change]:
    fleet = config.fleet
    if fleet.replicas < 2:
        return
    aware = ("precise", "sessions", "cache_aware", "dynamo") if facts.shares else ()
    for router in (*aware, "least_requests", "vllm"):
        if router != fleet.router:
            yield Change("router", {"fleet.router": router})
    if facts.shares and not fleet.neighbours:
        yield Change("neighbours", {"fleet.neighbours": True}, Price.HOST, _NETWORK)
    if facts.misses and fleet.store is None:
        text = "256GiB of memory that all replicas reach over a network (fleet.link)"
        yield Change("shared store", {"fleet.store": "256GiB"}, Price.HOST, text)
    if fleet.groups or not config.kv.prefix_sharing or config.kv.offload is not None:
        return
    for prefill in sorted({fleet.replicas // 4, fleet.replicas // 2} - {0, fleet.prefill}):
        yield Change("prefill apart", {"fleet.prefill": prefill}, cost=_NETWORK)
    if fleet.prefill:
        yield Change("prefill apart", {"fleet.prefill": 0})


def merged(changes: Iterable[Change]) -> dict[str, Any]:
    """The settings of several changes; of a later one where two have the same."""
    return {key: value for change in changes for key, value in change.settings.items()}


def left_out(config: RunConfig, devices: int) -> list[tuple[str, str]]:
    """Settings that could help and are not tried with so many devices, and why."""
    words = "how many of the tokens that it proposes a model keeps depends on its words, which are not simulated"
    kinds = "which replicas to make unlike the others, and how, has no single answer to try; sweep over it"
    found = [("scheduler.speculation.method", f"{words}; run it on the device itself")]
    if config.fleet.groups:
        kinds = "which groups to have, and of which devices, has no single answer to try; sweep over them"
        return [*found, ("executor.tensor_parallel, hardware", kinds)]
    return [*found, ("fleet.groups", kinds)] if devices > 1 else found
