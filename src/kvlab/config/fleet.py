"""Several replicas of an engine behind a router."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvlab.config.groups import ReplicaGroup, read_groups
from kvlab.config.values import MOST, all_at_least, at_least, one_of
from kvlab.errors import ConfigError
from kvlab.registry import registry

LOADS = ("auto", "exact", "polled")
PREFIXES = ("auto", "exact", "events", "memory", "none")
MOST_REPLICAS = 1024
PIECES = ("layer", "block")
SENDS = ("prompt", "chunk", "layer")
HANDSHAKES = ("prefill_first", "decode_first")
_TARGETS = {"queue": "4", "kv": "0.8", "rate": "2.5"}  # what decides how many serve, and an example of each
SCALES = tuple(_TARGETS)
PULLS = ("auto", "always", "cheaper")
LIVES = ("die", "drain", "return")


class LifeEvent(NamedTuple):
    """What becomes of a replica at a time of the run."""

    at_s: float
    event: str  # die: its requests are lost, and computed again elsewhere; drain: it gets no more; return: it does
    replica: int

    def __str__(self) -> str:
        return f"{self.at_s:g}:{self.event}:{self.replica}"


def life_events(life: Iterable[str], replicas: int) -> list[LifeEvent]:
    """What `fleet.life` says of so many replicas, by time. Raises ConfigError for what is no such event."""
    events = []
    for text in life:
        match = re.fullmatch(rf"(\d+(?:\.\d+)?):({'|'.join(LIVES)}):(\d+)", text)
        if not match or int(match[3]) >= replicas:
            known = f"0 to {replicas - 1}, as 'fleet.life=[10:die:{replicas - 1}]'"
            form = f"write seconds, one of {', '.join(LIVES)}, and a replica from {known}"
            raise ConfigError("fleet.life", text, form)
        events.append(LifeEvent(float(match[1]), match[2], int(match[3])))
    return sorted(events, key=lambda event: event.at_s)


@dataclass
class LinkConfig:
    """How K and V go from one replica to another: `setup_us`, then the pieces, then the bytes."""

    gb_s: float = 40.0  # of one device, in one direction, in 10^9 bytes per second: 400 Gbit/s Ethernet at 0.8
    setup_us: float = 400.0  # of a transfer, before its first byte moves
    piece_us: float = 1.0  # of each piece, one after the other
    pieces: str = "layer"  # what is one piece: K or V of one layer of a block; or a block, of all layers
    send: str = "prompt"  # what goes at once, as soon as it is computed: prompt; chunk of a step; layer of a chunk

    def __post_init__(self) -> None:
        if not 0 < self.gb_s <= MOST:
            raise ConfigError("fleet.link.gb_s", self.gb_s, "must be more than 0: nothing would ever arrive")
        all_at_least("fleet.link", self, ("setup_us", "piece_us"), 0)
        one_of("fleet.link.pieces", self.pieces, PIECES)
        one_of("fleet.link.send", self.send, SENDS)


@dataclass
class ScaleConfig:
    """How many of the replicas serve, by a rule: from `least` to all of them."""

    on: str | None = None  # what decides: queue, kv or rate; null: all serve all the time
    target: float | None = None  # of it for each replica: waiting requests, share of blocks, requests per second
    least: int = 1  # replicas that always serve; the most are all
    warm_up_s: float = 60.0  # from a replica's start until it takes requests; it counts as one that is there
    every_s: float = 15.0  # seconds between two decisions
    down_s: float = 300.0  # a replica stops if no decision for so long wanted more

    def check(self, key: str, most: int, of: str) -> None:
        """Raise ConfigError, naming the `key` of the rule, for what cannot be of `most` replicas, those `of`."""
        if self.on is not None:
            one_of(f"{key}.on", self.on, SCALES)
            if self.target is None:
                text = f"needs a value of {self.on} for each replica, as {key}.target={_TARGETS[self.on]}"
                raise ConfigError(f"{key}.target", None, text)
            if self.least > most > 0:  # of none there is nothing to start
                raise ConfigError(f"{key}.least", self.least, f"is more than {of}, the most; take fewer")
        if self.target is not None and not 0 < self.target <= MOST:
            raise ConfigError(f"{key}.target", self.target, "must be more than 0")
        if self.on == "kv" and self.target_given > 1:
            raise ConfigError(f"{key}.target", self.target, "is a share of the blocks, at most 1, as 0.8")
        at_least(f"{key}.least", self.least, 1)
        at_least(f"{key}.every_s", self.every_s, 0.01)
        all_at_least(key, self, ("warm_up_s", "down_s"), 0)

    @property
    def target_given(self) -> float:
        """The target, which there is where something decides."""
        return self.target or 1.0


@dataclass
class WeightsConfig:
    """How much each score counts for a router that adds scores; null: as much as it does there by default."""

    prefix: float | None = None  # the share of the prompt that the replica has cached
    kv: float | None = None  # the share of its memory that is free
    queue: float | None = None  # how short its queue is among all

    def __post_init__(self) -> None:
        for name, weight in self.given.items():
            at_least(f"fleet.weights.{name}", weight, 0, MOST)

    @property
    def given(self) -> dict[str, float]:
        """Those that were set."""
        every = {"prefix": self.prefix, "kv": self.kv, "queue": self.queue}
        return {name: weight for name, weight in every.items() if weight is not None}


@dataclass
class FleetConfig:
    """How many replicas serve a run's requests, which router chooses among them, and what it knows of them."""

    replicas: int = 1  # engines of the run's settings, each with devices and memory of its own
    groups: list[dict[str, Any]] = field(default_factory=list)  # unequal ones: [{count:4},{count:2,hardware:l4}]
    prefill: int = 0  # of the replicas, those that only compute prompts; the others pull K and V; 0: no split
    split_tokens: int = 0  # prompts with fewer tokens than that are computed where they decode
    handshake: str = "prefill_first"  # decode_first: blocks are reserved where it decodes before its prefill begins
    link: LinkConfig = field(default_factory=LinkConfig)  # between replicas, where they are split
    store: str | None = None  # memory that all replicas have in common, behind fleet.link, as 256GiB; null: none
    store_weight: float = 0.0  # for routers that see prefixes: what a token in the store counts of a cached one
    neighbours: bool = False  # a prefix that another replica holds is pulled from it over fleet.link
    pull: str = "auto"  # always; cheaper than computing, as predicted; auto: cheaper of neighbours, always of store
    router: str = "round_robin"  # who chooses a replica for each request
    load: str = "auto"  # what it knows of queues and memory: exact, or polled each load_s; auto: as the router does
    load_s: float = 0.1  # load=polled: seconds between two looks at the replicas
    prefixes: str = "auto"  # what it knows of caches: exact, events, memory (what it sent), none; auto as above
    events_ms: float = 10.0  # prefixes=events: from a step's end until the router has its KV events
    events_lost: float = 0.0  # prefixes=events: share of the batches of events that never come, 0 to 1
    memory_blocks: int | None = None  # prefixes=memory: blocks remembered of each replica; null: the router's own
    life: list[str] = field(default_factory=list)  # as [10:die:1]: at 10 s replica 1 dies; or drain, or return
    scale: ScaleConfig = field(default_factory=ScaleConfig)  # how many of them serve, by a rule; of a split, decode
    prefill_scale: ScaleConfig = field(default_factory=ScaleConfig)  # how many of fleet.prefill serve, by a rule
    weights: WeightsConfig = field(default_factory=WeightsConfig)  # of the scores that precise, estimated, load add
    temperature: float = 0.0  # router=dynamo: 0 takes the lowest cost; more draws with softmax over costs

    def __post_init__(self) -> None:
        if self.groups:
            self._take_counts_of_groups()
        at_least("fleet.replicas", self.replicas, 1, MOST_REPLICAS)
        all_at_least("fleet", self, ("prefill", "split_tokens", "events_ms", "temperature"), 0)
        if self.prefill and self.prefill >= self.replicas:
            text = f"leaves none of fleet.replicas={self.replicas} to decode; take fewer"
            raise ConfigError("fleet.prefill", self.prefill, text)
        registry("fleet.router").check(self.router)
        one_of("fleet.pull", self.pull, PULLS)
        one_of("fleet.handshake", self.handshake, HANDSHAKES)
        if self.prefill and self.link.send != "prompt" and self.handshake != "decode_first":
            text = "sends to blocks that are reserved before the prefill; use fleet.handshake=decode_first"
            raise ConfigError("fleet.link.send", self.link.send, text)
        one_of("fleet.load", self.load, LOADS)
        one_of("fleet.prefixes", self.prefixes, PREFIXES)
        at_least("fleet.load_s", self.load_s, 0.001)
        at_least("fleet.memory_blocks", self.memory_blocks, 1)
        for name, share in (("events_lost", self.events_lost), ("store_weight", self.store_weight)):
            if not 0 <= share <= 1:
                raise ConfigError(f"fleet.{name}", share, "must be in [0, 1]")
        less = f" less fleet.prefill={self.prefill}" if self.prefill else ""
        self._check_some_stay()
        self.scale.check("fleet.scale", self.replicas - self.prefill, f"fleet.replicas={self.replicas}{less}")
        self.prefill_scale.check("fleet.prefill_scale", self.prefill, f"fleet.prefill={self.prefill}")
        by_rule = {replica for _, replicas in self.rules for replica in replicas}
        for event in self.events:
            if event.replica in by_rule:
                text = f"is of replica {event.replica}, and whether it serves a rule decides; leave it out"
                raise ConfigError("fleet.life", str(event), text)

    @property
    def rules(self) -> list[tuple[ScaleConfig, range]]:
        """What decides how many replicas serve, and of which."""
        every = range(self.replicas)
        both = ((self.scale, every[self.prefill :]), (self.prefill_scale, every[: self.prefill]))
        return [(rule, replicas) for rule, replicas in both if rule.on is not None and replicas]

    @property
    def parts(self) -> list[ReplicaGroup]:
        """The groups of replicas in the order of their numbers; none where all are as the run's settings say.
        Raises ConfigError.
        """
        return read_groups(self.groups, self.replicas, self.prefill)

    @property
    def names(self) -> list[str]:
        """Of each replica, that of its group; none where all are of one."""
        parts = self.parts
        return [group.name for group in parts for _ in range(group.replicas)] if len(parts) > 1 else []

    @property
    def uses_link(self) -> bool:
        """Whether K and V go from one replica to another, or to a store and back."""
        return bool(self.prefill or self.store or self.neighbours)

    @property
    def events(self) -> list[LifeEvent]:
        """The replicas' lives, by time. Raises ConfigError for what is none."""
        return life_events(self.life, self.replicas)

    def fed_by(self, view: str) -> str:
        """What feeds the router's view of `load` or `prefixes`: as set, or what the router has by default."""
        source: str = getattr(self, view)
        if source == "auto":
            source = getattr(registry("fleet.router").get(self.router), view)
            known = (LOADS if view == "load" else PREFIXES)[1:]
            if source not in known:
                text = f"has {view}={source!r}; known: {', '.join(known)}"
                raise ConfigError("fleet.router", self.router, text)
        return source

    def _take_counts_of_groups(self) -> None:
        """Set `replicas` and `prefill` to what the groups have. Raises ConfigError where others were set."""
        parts = self.parts
        replicas = sum(group.replicas for group in parts)
        prefill = sum(group.replicas for group in parts if group.role == "prefill") or self.prefill
        for name, unset, count in (("replicas", 1, replicas), ("prefill", 0, prefill)):
            given = getattr(self, name)
            if given not in (unset, count):
                raise ConfigError(f"fleet.{name}", given, f"fleet.groups has {count}; leave fleet.{name} out")
            setattr(self, name, count)

    def _check_some_stay(self) -> None:
        """Raise ConfigError where no replica takes requests after some event."""
        every = range(self.replicas)
        stages = {" that prefills": every[: self.prefill], " that decodes": every[self.prefill :]}
        for stage, replicas in stages.items() if self.prefill else [("", every)]:
            there = set(replicas)
            for event in (event for event in self.events if event.replica in replicas):
                there = there | {event.replica} if event.event == "return" else there - {event.replica}
                if not there:
                    text = f"leaves no replica{stage} for requests that arrive after {event.at_s:g} s"
                    raise ConfigError("fleet.life", str(event), text)
