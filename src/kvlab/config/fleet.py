"""Several replicas of an engine behind a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.config.values import MOST, at_least, one_of
from kvlab.errors import ConfigError
from kvlab.registry import registry

LOADS = ("auto", "exact", "polled")
PREFIXES = ("auto", "exact", "events", "memory", "none")
MOST_REPLICAS = 1024


@dataclass
class FleetConfig:
    """How many replicas serve a run's requests, which router chooses among them, and what it knows of them."""

    replicas: int = 1  # engines of the run's settings, each with devices and memory of its own
    router: str = "round_robin"  # who chooses a replica for each request
    load: str = "auto"  # what it knows of queues and memory: exact, or polled each load_s; auto: as the router does
    load_s: float = 0.1  # load=polled: seconds between two looks at the replicas
    prefixes: str = (
        "auto"  # what it knows of caches: exact, KV events, its own memory, none; auto: as the router does
    )
    events_ms: float = 10.0  # prefixes=events: from a step's end until the router has its KV events
    events_lost: float = 0.0  # prefixes=events: share of the batches of events that never come, 0 to 1
    memory_blocks: int | None = None  # prefixes=memory: blocks remembered of each replica; null: the router's own
    weights: dict[str, float] = field(default_factory=dict)  # of a weighted router's scores: prefix, kv, queue
    temperature: float = 0.0  # router=dynamo: 0 takes the lowest cost; more draws with softmax over costs

    def __post_init__(self) -> None:
        at_least("fleet.replicas", self.replicas, 1, MOST_REPLICAS)
        registry("fleet.router").check(self.router)
        one_of("fleet.load", self.load, LOADS)
        one_of("fleet.prefixes", self.prefixes, PREFIXES)
        at_least("fleet.load_s", self.load_s, 0.001, MOST)
        at_least("fleet.events_ms", self.events_ms, 0, MOST)
        at_least("fleet.memory_blocks", self.memory_blocks, 1)
        at_least("fleet.temperature", self.temperature, 0, MOST)
        if not 0 <= self.events_lost <= 1:
            raise ConfigError("fleet.events_lost", self.events_lost, "must be in [0, 1]")
        for name, weight in self.weights.items():
            at_least(f"fleet.weights.{name}", weight, 0, MOST)
