"""A bounded decode batch, in turn: each step costs about the same however many sequences run."""

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("decode_round_robin")
class DecodeRoundRobin(Order):
    """First come, first served; at most `max_decode_seqs` decode in a step, those that have waited longest."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._queue: list[Sequence] = []  # those that decoded longest ago come first

    def decoding(self, sequences: list[Sequence], budget: int) -> list[Sequence]:
        still, known = set(sequences), set(self._queue)
        queue = [s for s in self._queue if s in still] + [s for s in sequences if s not in known]
        count = min(self.config.max_decode_seqs, budget)
        self._queue = queue[count:] + queue[:count]
        return queue[:count]
