"""dynamo: NVIDIA Dynamo's cost of blocks to compute and blocks to read."""

from collections.abc import Sequence

import numpy as np

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("dynamo")
class Dynamo(Router):
    """The lowest cost: blocks of prompts to be computed there, this request's behind its cached prefix included,
    plus the blocks in use, its own included (Dynamo's KV router, overlap credit 1). With `fleet.temperature` it
    draws: the softmax of costs between the lowest and the highest.
    """

    prefixes = "events"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        costs = []
        for view in replicas:
            missing = request.prompt_tokens - view.cached_tokens(request)
            prefill = (view.prefill_tokens + missing) / view.block_size
            costs.append(prefill + view.blocks_in_use + -(-missing // view.block_size))
        spread = max(costs) - min(costs)
        if not self.config.temperature or not spread:
            return self.lowest(replicas, costs)
        logits = -(np.array(costs) - min(costs)) / spread / self.config.temperature
        odds = np.exp(logits)
        place = int(self.random.choice(len(costs), p=odds / odds.sum()))
        return Choice(replicas[place].index, tuple(costs))
