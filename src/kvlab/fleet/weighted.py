"""Routers that add up scores, as llm-d's scheduler does."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvlab.config.fleet import FleetConfig
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router


class Weighted(Router):
    """The highest sum of scores from 0 to 1: the share of the prompt that is cached, of what is compared of it;
    free memory; and a short queue (1 for the shortest of all, 0 for the longest). Of equals any.
    """

    load = "polled"
    usual: ClassVar[Mapping[str, float]] = {}  # weights, unless `fleet.weights` has others

    def __init__(self, config: FleetConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self.weights = {**self.usual, **config.weights.given}

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        prefix, kv, queue = (self.weights.get(name, 0.0) for name in ("prefix", "kv", "queue"))
        queues = [view.waiting for view in replicas]
        block_size, _, most_blocks = self.memory
        compared = max(min(request.prompt_tokens, block_size * most_blocks), 1)
        longest, shortest = max(queues), min(queues)
        scores = []
        for view, waiting in zip(replicas, queues, strict=True):
            score = kv * (1 - view.kv_usage)
            score += queue * ((longest - waiting) / (longest - shortest) if longest > shortest else 1.0)
            if prefix:
                score += prefix * min(view.cached_tokens(request) / compared, 1.0)
            scores.append(score)
        return self.highest(replicas, scores)
