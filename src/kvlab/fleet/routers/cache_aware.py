"""cache_aware: SGLang's router, by what it sent before."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS

_CACHE_THRESHOLD = 0.3
_BALANCE_ABS, _BALANCE_REL = 64, 1.5


@ROUTERS.register("cache_aware")
class CacheAware(Router):
    """The replica that was sent the longest part of the prompt before, if that is more than 0.3 of it; else the one
    of which least is remembered. While the counts of requests in flight differ by more than 64 and by more than 1.5
    times, the one with the fewest. Thresholds and the size of its memory, 67,108,864 characters of 4 to a token,
    are those of the SGLang gateway 0.3.
    """

    prefixes = "memory"
    memory = (16, 2**26 // 4 // 16, 2**31)

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        counts = [view.in_flight for view in replicas]
        most, least = max(counts), min(counts)
        if most - least > _BALANCE_ABS and most > least * _BALANCE_REL:
            return self.lowest(replicas, counts)
        shares = [view.cached_tokens(request) / max(request.prompt_tokens, 1) for view in replicas]
        if max(shares) > _CACHE_THRESHOLD:
            return self.lowest(replicas, [-share for share in shares])
        return self.lowest(replicas, [view.remembered for view in replicas])
