"""random: any replica."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("random")
class Random(Router):
    """Each with the same probability, drawn with the run's seed."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        return Choice(replicas[int(self.random.integers(len(replicas)))].index)
