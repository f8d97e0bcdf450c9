"""Sends requests to replicas: a router chooses which, and what is not due yet waits for its time."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.core import FinishReason
from kvlab.engine.front_end import end_unserved
from kvlab.errors import ConfigError
from kvlab.fleet.base import Choice, Router
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica, SimulatedView


@dataclass(frozen=True, slots=True)
class Routed:
    """A request that was sent to a replica, when and why; `stage`: all of it, its prefill, or its decode; `among`:
    the replicas that the router was given.
    """

    request_id: str
    at_s: float
    choice: Choice
    stage: str = "all"
    among: tuple[int, ...] = ()


class Event(NamedTuple):
    """What happens to a request at a later time, unless it is aborted before."""

    when_s: float
    number: int  # orders events of the same time
    asked: Asked  # if the action is refused, or aborted before, `on_finish` is told that the request ended
    action: Callable[[float], None]  # given the time; may raise RequestRefusedError

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Nothing serves the request."""
        end_unserved(self.asked.request, self.asked.on_finish, reason, now, error)


class Dispatcher:
    """The replicas, what the router sees of them, and the requests that are on their way to them."""

    def __init__(self, replicas: Sequence[Replica], views: Sequence[SimulatedView], router: Router) -> None:
        self.replicas, self.views, self.router = replicas, views, router
        self.routed: list[Routed] = []
        self.lost_tokens = 0  # that replicas which died had computed for others, or for requests that were lost
        self._events: list[Event] = []  # a heap
        self._numbers = itertools.count()

    def at(self, when_s: float, asked: Asked, action: Callable[[float], None]) -> None:
        """Let something happen to a request at a later time."""
        heapq.heappush(self._events, Event(when_s, next(self._numbers), asked, action))

    def choose(self, router: Router, request: RoutedPrompt, among: Sequence[int], now: float, stage: str) -> int:
        """The replica of those `among` that a router chooses now. Raises ConfigError for one that is not there."""
        among = [index for index in among if self.replicas[index].takes_requests]
        choice = router.choose(request, [self.views[index].at(now) for index in among], now)
        if choice.replica not in among:
            text = f"chose replica {choice.replica} for {request.request_id}, of {', '.join(map(str, among))}"
            raise ConfigError("fleet.router", router.config.router, text)
        self.routed.append(Routed(request.request_id, now, choice, stage, tuple(among)))
        self.views[choice.replica].prefixes.sent(request)
        return choice.replica

    def _next_event_s(self) -> float:
        """The time of the next event; infinite where there is none."""
        return self._events[0].when_s if self._events else math.inf
