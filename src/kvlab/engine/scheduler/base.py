"""What every scheduling policy does; policies differ in when sequences may enter, orders in who goes first."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

from kvlab.config import SchedulerConfig
from kvlab.core import ScheduledSequence, Sequence, SequenceStatus
from kvlab.engine.scheduler.orders import ORDERS, Stage, StepState
from kvlab.engine.scheduler.victims import VICTIMS
from kvlab.engine.scheduler.waiting_queue import WaitingQueue
from kvlab.registry import Registry


class Scheduler(ABC):
    """Sequences that wait and sequences that run.

        add -> waiting --admit--> running --retire--> gone
                  ^______preempt______|

    It knows sequences and budgets, never the pool: the engine asks it for the `plan` of each of the order's
    `stages` and for a `candidate` to enter, tries to get their memory, and tells it by `admit` or `preempt`.
    `running` is in the order of admission.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.order = ORDERS.get(config.order)(config)
        self.waiting = WaitingQueue(self.order.rank)
        self.running: list[Sequence] = []
        self._victim = VICTIMS.get(config.preemption.victim or "last_admitted")
        self._longest_chunk = config.long_prefill_threshold or config.max_batched_tokens
        self._open = False
        self._state = StepState(0.0, lambda sequence: 0)
        self._decoding: list[Sequence] = []  # of this step
        self._prefilling: list[Sequence] = []
        self._entries: dict[Sequence, ScheduledSequence] = {}  # of those that decode, the same in every step

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What a step's tokens and memory are given to, one after the other."""
        return self.order.stages

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or has ended without having been retired."""
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def retire(self) -> list[Sequence]:
        """Take the sequences that ended out of the active set, and return them."""
        finished = SequenceStatus.FINISHED
        ended = [s for s in self.running if s.status is finished]
        for sequence in ended:
            self._entries.pop(sequence, None)
        if ended:
            self.running = [s for s in self.running if s.status is not finished]
        return ended

    def begin_step(self, now: float, cached_tokens: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        """Decide who could decode, who is in prefill, and whether waiting sequences may be admitted.

        `cached_tokens`: how many tokens of a sequence are in the prefix cache; called at most once for each.
        """
        self._state = StepState(now, cache(cached_tokens))
        self._decoding, self._prefilling = [], []
        for sequence in self.running:
            computed = sequence.num_computed
            # `is_decoding`, inlined: every running sequence is asked in every step.
            decodes = computed >= sequence.num_prompt_tokens and computed + 1 == len(sequence.token_ids)
            (self._decoding if decodes else self._prefilling).append(sequence)
        self._open = len(self.waiting) > 0 and self.may_admit(now)

    def plan(self, stage: Stage, budget: int) -> list[ScheduledSequence]:
        """The running sequences that take part in a stage of the step, with at most `budget` tokens in all."""
        if stage is Stage.DECODE:
            running = SequenceStatus.RUNNING
            decoding = [s for s in self._decoding if s.status is running]  # not preempted in this step
            entries, decoding = self._entries, self.order.decoding(decoding, budget)
            return [entries.get(s) or entries.setdefault(s, ScheduledSequence(s, 1)) for s in decoding]
        scheduled = []
        for sequence in sorted(self._prefilling, key=self.order.rank):
            if budget > 0 and sequence.status is SequenceStatus.RUNNING:
                scheduled.append(self.chunk(sequence, budget))
                budget -= scheduled[-1].num_tokens
        return scheduled

    def chunk(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """How many of a prefilling sequence's tokens a step with this budget left takes."""
        return ScheduledSequence(sequence, min(sequence.num_uncomputed, budget, self._longest_chunk))

    def num_decoding(self) -> int:
        """How many of those that run could decode in this step."""
        return len(self._decoding)

    def candidate(self) -> Sequence | None:
        """The sequence to admit next, where the policy and `max_batch_size` let one. If it does not fit, none is
        admitted in its place.
        """
        return self.order.choose(self.waiting, self._state) if self._open and self.has_room() else None

    def has_room(self) -> bool:
        """Whether fewer than `max_batch_size` sequences run."""
        return len(self.running) < self.config.max_batch_size

    def headroom(self, free_kv_tokens: int, total_kv_tokens: int) -> int:
        """Of the tokens free when admission began, how many it leaves alone; none for a sequence that would run
        alone.
        """
        if not self.running:
            return 0
        reserve = math.ceil(free_kv_tokens * self.config.admission_reserve)
        return max(reserve, math.ceil(total_kv_tokens * self.config.watermark))

    def admit(self, sequence: Sequence) -> None:
        """Move the candidate from waiting to running."""
        if sequence is not self.candidate():
            raise RuntimeError(f"request {sequence.request.request_id!r} is not the candidate")
        self.waiting.remove(sequence)
        self.join(sequence)

    def join(self, sequence: Sequence) -> None:
        """Make a sequence that has memory already one of those that run."""
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def put_first(self, sequences: list[Sequence]) -> None:
        """Queue sequences at the front of the line, in this order."""
        self.waiting.put_first(sequences)

    def victim(self) -> Sequence:
        """Who gives up its blocks when memory runs out."""
        return self._victim(self.running)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the line; all its tokens will be computed again."""
        self.running.remove(sequence)
        self._entries.pop(sequence, None)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        self.waiting.put_first([sequence])

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out of the line for good, if it is there."""
        self.waiting.remove(sequence)

    @abstractmethod
    def may_admit(self, now: float) -> bool:
        """Whether a waiting sequence may enter now. There is at least one."""

    @abstractmethod
    def next_wakeup(self) -> float | None:
        """When, with nothing running, to ask `may_admit` again; None: when something arrives."""


POLICIES: Registry[type[Scheduler]] = Registry("scheduler.policy")
