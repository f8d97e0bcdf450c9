"""Which replica gets a request, and when."""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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


class Dispatcher:
    """The replicas, what routers see of them, and the requests that wait for their time to be sent there. Of the
    replicas the first `fleet.prefill` compute prompts, chosen by `prefill_router`; the others serve the rest.
    """

    def __init__(
        self, replicas: Sequence[Replica], views: Sequence[SimulatedView], router: Router, prefill_router: Router
    ) -> None:
        self.replicas, self.views, self.router, self._prefill_router = replicas, views, router, prefill_router
        self.routed: list[Routed] = []
        self.lost_tokens = 0  # that replicas which died had computed for others, or for requests that were lost
        self._due: list[tuple[float, int, Asked]] = []  # a heap of requests by time, equal ones in their order
        self._numbers = itertools.count()

    def serve_at(self, when_s: float, asked: Asked) -> None:
        """Serve a request at a later time, unless it is aborted before."""
        heapq.heappush(self._due, (when_s, next(self._numbers), asked))

    def choose(self, request: RoutedPrompt, now: float, stage: str = "all") -> int:
        """The replica that the stage's router chooses now. Raises ConfigError for one that is not there."""
        prefill, is_prefill = self.router.config.prefill, stage == "prefill"
        router = self._prefill_router if is_prefill else self.router
        replicas = self.replicas[:prefill] if is_prefill else self.replicas[prefill:]
        among = tuple(replica.index for replica in replicas if replica.takes_requests)
        views = [self.views[index].at(now) for index in among]
        choice = router.checked(router.choose(request, views, now), request, among)
        self.routed.append(Routed(request.request_id, now, choice, stage, among))
        self.views[choice.replica].prefixes.sent(request)
        return choice.replica

    def _next_due_s(self) -> float:
        """When the next of the requests that wait is to be served; infinite where none waits."""
        return self._due[0][0] if self._due else math.inf
