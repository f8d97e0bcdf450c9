"""oracle: knows how long outputs will be and what each replica holds."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("oracle")
class Oracle(Router):
    """The lowest number of tokens to compute before this request could end: those of the requests there, outputs
    that no server knows included, and of its own prompt those that are not cached. A yardstick for the others, not
    a bound: it does not know what comes next, and counts a token of output like one of a prompt.
    """

    prefixes = "exact"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        costs = [view.work_tokens + request.prompt_tokens - view.cached_tokens(request) for view in replicas]
        return self.lowest(replicas, costs)
