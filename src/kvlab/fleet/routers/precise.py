"""precise: llm-d's scores, with prefixes by KV events."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvlab.fleet.base import ReplicaView, RoutedRequest
from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.weighted import Weighted


@ROUTERS.register("precise")
class Precise(Weighted):
    """llm-d with its indexer of KV events: 3 x prefix + 2 x free memory + 2 x short queue."""

    prefixes = "events"
    usual: ClassVar[Mapping[str, float]] = {"prefix": 3.0, "kv": 2.0, "queue": 2.0}

    def prefix_scores(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[float]:
        """As llm-d's scorer: of the replicas that have any of the prompt, 1 for the most, 0 for the least, and 1
        for all if they have the same; 0 for the others (llm-d-inference-scheduler, pkg/plugins/scorer/utils.go).
        """
        cached = [view.cached_tokens(request) for view in replicas]
        most, least = max(cached), min(filter(None, cached), default=0)
        if most == least:
            return [1.0 if tokens else 0.0 for tokens in cached]
        return [max(tokens - least, 0) / (most - least) for tokens in cached]
