"""What every scheduling policy does; policies differ in when sequences may enter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from kvlab.config import SchedulerConfig
from kvlab.core import ScheduledSequence, Sequence, SequenceStatus, StepPlan


class Scheduler(ABC):
    """Sequences that wait and sequences that run.

        add -> waiting --admit--> running --retire--> gone
                  ^______preempt______|

    It knows sequences and budgets, never the pool. `running` is in the order of admission; the order of
    `waiting` is kept, except that a preempted sequence goes to its front.
    """

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.config = config
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or has ended without having been retired."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def retire(self) -> list[Sequence]:
        """Take the sequences that ended out of the active set, and return them."""
        ended = [s for s in self.running if s.status is SequenceStatus.FINISHED]
        if ended:
            self.running = [s for s in self.running if s.status is not SequenceStatus.FINISHED]
        return ended

    def admit(self, now: float, free_slots: int, free_kv_tokens: int | None) -> list[Sequence]:
        """Move sequences from waiting to running, and return them.

        Stops at `max_batch_size`, at `free_slots`, and where the known tokens of the next sequence, rounded
        up to blocks, exceed what is left of `free_kv_tokens` (None: no such limit) less the reserve. The reserve is
        waived for a sequence that would run alone. The head of the line is never overtaken.
        """
        admitted: list[Sequence] = []
        if not self.waiting or not self.may_admit(now):
            return admitted
        spent = 0
        while self.waiting and len(self.running) < self.config.max_batch_size and len(admitted) < free_slots:
            if free_kv_tokens is not None:
                head = len(self.waiting[0].token_ids)
                need = -(-head // self.block_size) * self.block_size
                reserve = self.config.admission_reserve if self.running else 0.0
                if spent + need > free_kv_tokens * (1 - reserve):
                    break
                spent += need
            sequence = self.waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> StepPlan:
        """The step's batch: every sequence that decodes, then prefill chunks within `max_batched_tokens`."""
        budget = self.config.max_batched_tokens
        decode = [ScheduledSequence(s, 1) for s in self.running if s.is_decoding]
        budget -= len(decode)
        prefill = []
        for sequence in self.running:
            if budget <= 0:
                break
            if not sequence.is_decoding:
                count = min(sequence.num_uncomputed, budget)
                prefill.append(ScheduledSequence(sequence, count))
                budget -= count
        return StepPlan((*decode, *prefill))

    def victim(self) -> Sequence:
        """Who gives up its blocks when memory runs out: the last admitted."""
        return self.running[-1]

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the queue; all its tokens will be computed again."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a waiting sequence out of the queue for good."""
        self.waiting.remove(sequence)

    @abstractmethod
    def may_admit(self, now: float) -> bool:
        """Whether a waiting sequence may enter now. There is at least one."""

    @abstractmethod
    def next_wakeup(self) -> float | None:
        """When, with nothing running, to ask `may_admit` again; None: when something arrives."""
