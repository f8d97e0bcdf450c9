"""Short requests before long ones: the lowest mean waiting time, at the price of the long ones'."""

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order

_TOKENS = 1000  # that `scheduler.aging_s` seconds of waiting make up for


@ORDERS.register("shortest_first")
class ShortestFirst(Order):
    """By prompt and `max_tokens` together; what a request will really produce is not known.
    `scheduler.aging_s` seconds of waiting make up for 1,000 tokens.
    """

    def rank(self, sequence: Sequence) -> float:
        return self.aged(sequence.request.max_total_tokens / _TOKENS, sequence)
