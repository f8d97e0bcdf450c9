"""Short requests before long ones: the lowest mean waiting time, at the price of the long ones'."""

from __future__ import annotations

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("shortest_first")
class ShortestFirst(Order):
    """By prompt and `max_tokens` together. What a request will really produce nobody knows."""

    def rank(self, sequence: Sequence) -> int:
        """See Order."""
        return sequence.request.max_total_tokens
