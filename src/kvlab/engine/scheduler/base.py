"""What every scheduling policy does; policies differ in when sequences may enter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress

from kvlab.config import SchedulerConfig
from kvlab.core import ScheduledSequence, Sequence, SequenceStatus, StepPlan


class Scheduler(ABC):
    """Sequences that wait and sequences that run.

        add -> waiting --admit--> running --retire--> gone
                  ^______preempt______|

    It knows sequences and budgets, never the pool: the engine asks it for a `candidate`, tries to get its memory,
    and tells it by `admit`. `running` is in the order of admission; the order of
    `waiting` is kept, except that a preempted sequence goes to its front.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._open = False

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

    def open_admission(self, now: float) -> None:
        """A step begins: decide whether waiting sequences may enter in it."""
        self._open = bool(self.waiting) and self.may_admit(now)

    def candidate(self) -> Sequence | None:
        """The sequence that would enter next, where the policy and `max_batch_size` let one. The head of the line
        is never overtaken.
        """
        return self.waiting[0] if self._open and self.waiting and self.has_room() else None

    def has_room(self) -> bool:
        """Whether fewer than `max_batch_size` sequences run."""
        return len(self.running) < self.config.max_batch_size

    def headroom(self, free_kv_tokens: int | None) -> int:
        """Of the tokens free when admission began, how many it leaves alone; none for a sequence that would run
        alone, or where a token budget has no meaning.
        """
        if free_kv_tokens is None or not self.running:
            return 0
        return math.ceil(free_kv_tokens * self.config.admission_reserve)

    def admit(self, sequence: Sequence) -> None:
        """Move the candidate from waiting to running."""
        if not self.waiting or self.waiting[0] is not sequence:
            raise RuntimeError(f"request {sequence.request.request_id!r} is not the head of the line")
        self.join(self.waiting.popleft())

    def join(self, sequence: Sequence) -> None:
        """Make a sequence that has memory already one of those that run."""
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def put_first(self, sequences: list[Sequence]) -> None:
        """Queue sequences at the front of the line, in this order."""
        self.waiting.extendleft(reversed(sequences))

    def chunk(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """How many of a prefilling sequence's tokens a step with this budget left takes."""
        return ScheduledSequence(sequence, min(sequence.num_uncomputed, budget))

    def plan(self) -> StepPlan:
        """The running sequences' part of the step: all that decode, then prefill chunks within
        `max_batched_tokens`.
        """
        scheduled = [ScheduledSequence(s, 1) for s in self.running if s.is_decoding]
        budget = self.config.max_batched_tokens - len(scheduled)
        for sequence in self.running:
            if budget > 0 and not sequence.is_decoding:
                scheduled.append(self.chunk(sequence, budget))
                budget -= scheduled[-1].num_tokens
        return StepPlan(tuple(scheduled))

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
        """Take a sequence out of the queue for good, if it is there."""
        with suppress(ValueError):
            self.waiting.remove(sequence)

    @abstractmethod
    def may_admit(self, now: float) -> bool:
        """Whether a waiting sequence may enter now. There is at least one."""

    @abstractmethod
    def next_wakeup(self) -> float | None:
        """When, with nothing running, to ask `may_admit` again; None: when something arrives."""
