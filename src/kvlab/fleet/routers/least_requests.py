"""least_requests: the replica with the fewest requests in flight."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("least_requests")
class LeastRequests(Router):
    """Counts what it sent itself, which is never late; of equals the first."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        return self.lowest(replicas, [view.in_flight for view in replicas])
