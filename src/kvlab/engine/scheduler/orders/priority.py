"""By the priority that requests come with."""

from __future__ import annotations

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders.base import Order


class PriorityOrder(Order):
    """By `Request.priority`, the lowest number first, then by arrival."""

    def rank(self, sequence: Sequence) -> int:
        """See Order."""
        return sequence.request.priority
