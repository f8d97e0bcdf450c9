"""round_robin: the replicas in turn."""

from collections.abc import Sequence

from kvlab.config.fleet import FleetConfig
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("round_robin")
class RoundRobin(Router):
    """One after the other, whatever they do: counts are even, and every replica computes each prefix."""

    def __init__(self, config: FleetConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self._turn = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        place = self._turn % len(replicas)
        self._turn += 1
        return Choice(replicas[place].index)
