"""By the priority that requests come with."""

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("priority")
class PriorityOrder(Order):
    """By `Request.priority`, the lowest number first, then by arrival. `scheduler.aging_s` seconds of waiting make
    up for one level of priority.
    """

    def rank(self, sequence: Sequence) -> float:
        return self.aged(sequence.request.priority, sequence)
