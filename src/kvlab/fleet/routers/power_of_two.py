"""power_of_two: of two replicas that are drawn, the one with fewer requests in flight."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("power_of_two")
class PowerOfTwo(Router):
    """The power of two choices (Mitzenmacher, 2001): nearly the balance of the least, from two looks."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        drawn = self.random.choice(len(replicas), size=min(2, len(replicas)), replace=False)
        two = [replicas[place] for place in sorted(drawn.tolist())]
        return self.lowest(two, [view.in_flight for view in two])
