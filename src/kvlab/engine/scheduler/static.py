"""Static batches."""

from kvlab.engine.scheduler.base import POLICIES, Scheduler


@POLICIES.register("static")
class StaticScheduler(Scheduler):
    """No sequence is admitted while a batch runs; the next is formed when it is full or its oldest member has
    waited `max_wait_ms`. Each member is given the memory for its longest possible output at once.
    """

    def may_admit(self, now: float) -> bool:
        """Only with nothing running, and a full batch or an expired wait."""
        if self.running:
            return False
        full = len(self.waiting) >= self.config.max_batch_size
        return full or now >= self._deadline()

    def next_wakeup(self) -> float | None:
        """When the wait of the oldest waiting sequence ends."""
        return self._deadline() if len(self.waiting) and not self.running else None

    def _deadline(self) -> float:
        oldest = min(sequence.request.arrival_s for sequence in self.waiting)
        return oldest + self.config.max_wait_ms / 1000
