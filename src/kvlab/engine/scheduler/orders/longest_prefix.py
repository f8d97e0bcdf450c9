"""Those first that find most of their prompt in the prefix cache (SGLang's cache-aware scheduling, 2024)."""

from itertools import islice

from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order, StepState
from kvlab.engine.scheduler.waiting_queue import WaitingQueue

_TOKENS = 1000  # cached tokens that `scheduler.aging_s` seconds of waiting make up for
_WINDOW = 64  # sequences that are compared


@ORDERS.register("longest_prefix")
class LongestPrefix(Order):
    """By the number of tokens in the cache now, the most first, then by arrival; preempted sequences before all.
    `scheduler.aging_s` seconds of waiting make up for 1,000 cached tokens.

    What is cached changes with every step, so that sequences are compared anew, but only where one can be admitted,
    and only the first 64 of the queue, which is in the order of arrival.
    """

    def choose(self, waiting: WaitingQueue, state: StepState) -> Sequence | None:
        head = waiting.head
        if head is None or head.preemptions or head.index:  # preempted, or a further sample of a running request
            return head
        return min(
            islice(waiting, _WINDOW),
            key=lambda sequence: self.aged(-state.cached_tokens(sequence) / _TOKENS, sequence),
        )
