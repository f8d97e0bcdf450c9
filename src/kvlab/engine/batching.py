"""Who takes part in a step: plan, reserve, preempt, admit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from kvlab.core import ScheduledSequence, Sequence, StepPlan
from kvlab.engine.admission import Admission
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.orders import Stage
from kvlab.errors import OutOfBlocksError
from kvlab.kv.journal import BlockJournal
from kvlab.kv.protocol import KVCachePool

Fail = Callable[[Sequence, str], None]


@dataclass(slots=True)
class StepBatch:
    """A step's batch, each of its entries reserved in the pool, stage by stage in the order of the plan."""

    stages: dict[Stage, list[ScheduledSequence]] = field(default_factory=dict)
    preempted: int = 0

    def plans(self, *, mixed: bool) -> list[StepPlan]:
        """The step's forward passes: one, or unless `mixed` one for those that decode and one for the others."""
        passes: dict[bool, list[ScheduledSequence]] = {}
        samples: Counter[bool] = Counter()
        for stage, entries in self.stages.items():
            if entries:
                which = mixed or stage is Stage.DECODE
                passes.setdefault(which, []).extend(entries)
                samples[which] += len(entries) if stage is Stage.DECODE else sum(e.samples for e in entries)
        return [StepPlan(tuple(entries), samples[which]) for which, entries in passes.items()]

    def num_decode_tokens(self) -> int:
        """Tokens of sequences that decode."""
        return len(self.stages.get(Stage.DECODE, ()))

    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of sequences that are computed again."""
        others = (entries for stage, entries in self.stages.items() if stage is not Stage.DECODE)
        return sum(entry.num_tokens for entries in others for entry in entries)


class BatchBuilder:
    """Puts a step's batch together. `fail` ends a sequence for which there is no memory."""

    def __init__(
        self, pool: KVCachePool, scheduler: Scheduler, fail: Fail, journal: BlockJournal | None = None
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._fail = fail
        self._journal = journal

    def compose(self, now: float) -> StepBatch:
        """Plan and reserve stage by stage, within `max_batched_tokens`."""
        self._scheduler.begin_step(now, self._cached_tokens)
        batch = StepBatch()
        budget = self._scheduler.config.max_batched_tokens
        for stage in self._scheduler.stages:
            if stage is not Stage.ADMIT:
                batch.stages[stage] = self._scheduler.plan(stage, budget)
                self._reserve(batch, stage, now)
            elif not batch.preempted:  # who enters now would take what running sequences just gave up
                held_back = 0 if Stage.DECODE in batch.stages else self._scheduler.num_decoding()
                batch.stages[stage] = self._admit(budget, held_back, now)
            budget -= sum(entry.num_tokens for entry in batch.stages.get(stage, ()))
        return batch

    def _cached_tokens(self, sequence: Sequence) -> int:
        return self._pool.prefix_tokens(sequence.token_ids, sequence.request.salt)

    def _reserve(self, batch: StepBatch, stage: Stage, now: float) -> None:
        """Make room for a stage's entries: preempt until they fit, or fail those that do not."""
        while entries := batch.stages[stage]:
            try:
                self._pool.reserve(slots_of(s for s, _ in entries), [count for _, count in entries])
            except OutOfBlocksError as error:
                self._give_way(batch, stage, error, now)
            else:
                return

    def _give_way(self, batch: StepBatch, stage: Stage, error: OutOfBlocksError, now: float) -> None:
        running = self._scheduler.running
        if self._scheduler.config.on_exhaustion == "fail" or len(running) == 1:
            entries = batch.stages[stage]
            batch.stages[stage] = [e for e in entries if e.sequence.slot not in error.slots]
            refused = [e.sequence for e in entries if e.sequence.slot in error.slots]
            names = ", ".join(repr(sequence.request.request_id) for sequence in refused)
            for sequence in refused:
                self._fail(sequence, f"{error}; did not fit: {names}")
            return
        victim = self._scheduler.victim()
        self._pool.free_slot(slot_of(victim))
        victim.slot = None
        victim.preemptions += 1
        victim.preempted_s.append(now)
        self._scheduler.preempt(victim)
        batch.preempted += 1
        for of_stage, entries in batch.stages.items():
            batch.stages[of_stage] = [e for e in entries if e.sequence is not victim]

    def _admit(self, budget: int, held_back: int, now: float) -> list[ScheduledSequence]:
        """Let sequences enter while there are tokens in the step's budget and memory for all they have to compute.

        Each is reserved at once, so that the next may share the blocks that it fills in this very step.
        """
        entered: list[ScheduledSequence] = []
        admission: Admission | None = None
        while budget > 0 and (sequence := self._scheduler.candidate()) is not None:
            admission = admission or Admission(self._pool, self._scheduler, held_back=held_back)
            try:
                sequence.slot = self._pool.allocate_slot(
                    token_ids=sequence.token_ids,
                    salt=sequence.request.salt,
                    keep_free=admission.keep_free(sequence),
                    resumed=sequence.preemptions > 0,
                )
            except OutOfBlocksError:
                break
            self._scheduler.admit(sequence)
            admission.entered(sequence)
            sequence.num_computed = self._pool.get_seq_len(sequence.slot)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                sequence.cached_tokens = sequence.num_computed
            else:
                sequence.resumed_s.append(now)
            if self._journal is not None:
                self._journal.assign(sequence.slot, sequence.key)
            entry = self._scheduler.chunk(sequence, budget)
            self._pool.reserve([sequence.slot], [entry.num_tokens])
            budget -= entry.num_tokens
            entered.append(entry)
        return entered


def slot_of(sequence: Sequence) -> int:
    """The pool's slot of a sequence that runs."""
    return slots_of([sequence])[0]


def slots_of(sequences: Iterable[Sequence]) -> list[int]:
    """The pool's slots of sequences that run."""
    slots = [sequence.slot for sequence in sequences]
    if None in slots:
        raise RuntimeError("a sequence runs without a slot")
    return cast("list[int]", slots)
