"""sticky: where the prefix is, until that replica is saturated."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS

_MOST_WAITING, _MOST_USAGE = 5, 0.8  # llm-d's detector of saturation


@ROUTERS.register("sticky")
class Sticky(Router):
    """Of the replicas where at most 5 requests wait and at most 0.8 of the memory is in use (llm-d's limits of
    saturation), or of all if there is none, the one that has most of the prompt; where none has any of it, the one
    with the fewest requests in flight.
    """

    load = "polled"
    prefixes = "events"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        open_ones = [
            view for view in replicas if view.waiting <= _MOST_WAITING and view.kv_usage <= _MOST_USAGE
        ] or replicas
        cached = [view.cached_tokens(request) for view in open_ones]
        if max(cached):
            return self.lowest(open_ones, [-tokens for tokens in cached])
        return self.lowest(open_ones, [view.in_flight for view in open_ones])
