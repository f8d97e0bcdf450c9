"""The contract of a router: what it is told of a request and of the replicas, and what it answers.

A simulated fleet and a proxy in front of real servers use the same routers: each makes these views its own way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from kvlab.config.fleet import FleetConfig
from kvlab.errors import ConfigError, shown
from kvlab.fleet.memories import Memories
from kvlab.kv.tiers.base import Key


class RoutedRequest(Protocol):
    """What a router may know of a request before it is served."""

    @property
    def request_id(self) -> str:
        """Its name, which no other request has."""

    @property
    def session(self) -> str:
        """The conversation that it is a turn of; its own name where it is of none."""

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompt."""

    @property
    def output_tokens(self) -> int:
        """The most tokens that it asked for."""

    def keys(self, block_size: int, most: int = ...) -> Sequence[Key]:
        """The keys of the prompt's first `most` whole blocks of so many tokens. Equal keys are equal prefixes."""


class ReplicaView(Protocol):
    """What a router believes of a replica. It may be late, and what is missing from it is there all the same."""

    @property
    def index(self) -> int:
        """The replica's number."""

    @property
    def in_flight(self) -> int:
        """Requests that the router sent there and that have not ended: it knows these itself."""

    @property
    def running(self) -> int:
        """Sequences that hold memory there."""

    @property
    def waiting(self) -> int:
        """Sequences in its queue."""

    @property
    def sent_since(self) -> int:
        """Requests that the router sent there since it looked last."""

    @property
    def kv_usage(self) -> float:
        """Share of its blocks that are in use, 0 to 1."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the requests in flight there that are still to be computed."""

    @property
    def work_tokens(self) -> int:
        """These, and the output tokens that are still to come, which no router in a server can know."""

    @property
    def blocks_in_use(self) -> int:
        """The blocks that its requests hold."""

    @property
    def block_size(self) -> int:
        """Tokens of one of these."""

    @property
    def remembered(self) -> int:
        """Blocks that it is known to have cached; 0: the view knows no prefixes."""

    def cached_tokens(self, request: RoutedRequest) -> int:
        """Tokens from the prompt's first on that the replica is believed to have cached, whole blocks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which replica gets a request, and the scores that decided, one for each replica that was asked; none where
    the router scores nothing.
    """

    replica: int
    scores: tuple[float, ...] = ()


class Router(ABC):
    """Chooses a replica for each request. It may keep what it chose before, and nothing else that changes.

    A router in a server sees late and partial views: `load` and `prefixes` say what feeds this one's there, and are
    what `fleet.load=auto` and `fleet.prefixes=auto` stand for.
    """

    load: ClassVar[str] = "exact"
    prefixes: ClassVar[str] = "none"
    #: prefixes=memory: tokens of a remembered block, blocks of each replica, and of a prompt that are compared
    memory: ClassVar[tuple[int, int, int]] = (16, 31_250, 2**31)
    #: prefixes=memory: whether it forgets a prompt from its end; else from its beginning, behind which blocks count
    #: as far as any replica's memory has all that is before them
    keeps_heads: ClassVar[bool] = True

    def __init__(self, config: FleetConfig, seed: int = 0) -> None:
        self.config = config
        self.memories = Memories()  # prefixes=memory: of its replicas
        self.random = np.random.default_rng([seed, 0x666C6565])  # of its own: the workload stays as it is

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        """The replica for a request that arrives `now`, one of `replicas`: those that take requests, in the order
        of their numbers, at least one.
        """

    def lowest(self, replicas: Sequence[ReplicaView], costs: Sequence[float]) -> Choice:
        """The replica of the lowest cost; of equals the first."""
        self._check(costs)
        best = min(range(len(costs)), key=costs.__getitem__)
        return Choice(replicas[best].index, tuple(costs))

    def checked(self, choice: object, request: RoutedRequest, among: Sequence[int]) -> Choice:
        """What it chose for a request among these replicas. Raises ConfigError for what is none of them."""
        text = ", ".join(map(str, among))
        if not isinstance(choice, Choice):
            text = f"has to return a Choice of {text} for {shown(request.request_id)}, not {shown(choice, repr)}"
        elif isinstance(choice.replica, int | np.integer) and choice.replica in among:
            return choice if type(choice.replica) is int else replace(choice, replica=int(choice.replica))
        else:
            text = f"chose replica {choice.replica!r} for {shown(request.request_id)}, of {text}"
        raise ConfigError("fleet.router", self.config.router, text)

    def _check(self, scores: Sequence[float]) -> None:
        """Raise ConfigError for scores that have no order."""
        if any(score != score for score in scores):
            text = f"scores replicas with {', '.join(map(str, scores))}; what is no number has no order"
            raise ConfigError("fleet.router", self.config.router, text)

    def highest(self, replicas: Sequence[ReplicaView], scores: Sequence[float]) -> Choice:
        """The replica of the highest score; of equals any."""
        self._check(scores)
        most = max(scores)
        best = [place for place, score in enumerate(scores) if score == most]
        place = best[0] if len(best) == 1 else best[int(self.random.integers(len(best)))]
        return Choice(replicas[place].index, tuple(scores))
