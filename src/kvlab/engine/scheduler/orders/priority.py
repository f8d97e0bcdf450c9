"""By the priority that requests come with."""

from __future__ import annotations

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("priority")
class PriorityOrder(Order):
    """By `Request.priority`, the lowest number first, then by arrival."""

    def rank(self, sequence: Sequence) -> int:
        """See Order."""
        return sequence.request.priority
