"""Routers that add up scores, as llm-d's scheduler does."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvlab.config.fleet import FleetConfig
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router


class Weighted(Router):
    """The highest sum of scores from 0 to 1: what is cached of the prompt; free memory; and a short queue (1 for
    the shortest of all, 0 for the longest). Of equals any.
    """

    load = "polled"
    usual: ClassVar[Mapping[str, float]] = {}  # weights, unless `fleet.weights` has others

    def __init__(self, config: FleetConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self.weights = {**self.usual, **config.weights.given}

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        prefix, kv, queue = (self.weights.get(name, 0.0) for name in ("prefix", "kv", "queue"))
        queues = [view.waiting for view in replicas]
        longest, shortest = max(queues), min(queues)
        cached = self.prefix_scores(request, replicas) if prefix else [0.0] * len(replicas)
        scores = []
        for view, waiting, share in zip(replicas, queues, cached, strict=True):
            score = kv * (1 - view.kv_usage)
            score += queue * ((longest - waiting) / (longest - shortest) if longest > shortest else 1.0)
            scores.append(score + prefix * share)
        return self.highest(replicas, scores)

    def prefix_scores(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[float]:
        """The share of the prompt's whole blocks that is cached, of those that are compared."""
        block_size, _, most_blocks = self.memory
        compared = max(block_size * min(request.prompt_tokens // block_size, most_blocks), 1)
        return [min(view.cached_tokens(request) / compared, 1.0) for view in replicas]
