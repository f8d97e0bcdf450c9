"""Earliest deadline first (Liu and Layland, 1973)."""

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("deadline")
class EarliestDeadline(Order):
    """By arrival and `Request.deadline_s` together, or `scheduler.default_deadline_s` for a request without one.

    It needs no aging: a deadline is behind the arrival, so that a sequence is overtaken by those alone that arrive
    before its own deadline.
    """

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        slack = self.config.default_deadline_s if request.deadline_s is None else request.deadline_s
        return request.arrival_s + slack
