"""sessions: consistent hashing of conversations, with bounded load."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS

_POINTS = 128  # of each replica on the ring
_MOST_LOAD = 1.25  # times the mean that a replica may have in flight


@ROUTERS.register("sessions")
class Sessions(Router):
    """A conversation stays with the replica that follows its hash on a ring, unless that has more than 1.25 times
    the mean number of requests in flight: then the next on the ring that has not (Mirrokni et al., 2018). When a
    replica comes or goes, no conversation moves but its own.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        views = {view.index: view for view in replicas}
        ring = _ring(tuple(views))
        most = math.ceil(_MOST_LOAD * (sum(view.in_flight for view in replicas) + 1) / len(replicas))
        start = bisect_left(ring, (_place(request.session), -1))
        for step in range(len(ring)):
            index = ring[(start + step) % len(ring)][1]
            if views[index].in_flight < most:
                return Choice(index)
        return Choice(replicas[0].index)


@lru_cache(maxsize=64)
def _ring(replicas: tuple[int, ...]) -> list[tuple[int, int]]:
    """Places of these replicas, sorted, each with whose it is."""
    return sorted((_place(f"{index} {point}"), index) for index in replicas for point in range(_POINTS))


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
