"""Runs a step's forward passes so that a failure ends only the sequences that cause it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab import core
from kvlab.core import ScheduledSequence, StepPlan
from kvlab.engine.batching import slots_of
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import OutOfBlocksError
from kvlab.kv.protocol import KVCachePool
from kvlab.kv.view import CacheView

_HOPELESS = 8  # sequences that fail alone, one after the other, before the fault is the device's


class PassRunner:
    """Executes passes; each that raises is rolled back and run again in two halves, down to single sequences.

    An error that names its culprits (`request_ids`) is believed. Finding one of B otherwise takes 2 log2(B) more
    passes; a fault that does not come back costs nobody anything. Where sequence after sequence fails alone and
    nothing succeeds in between, it is not them: then a part that fails is not divided further. `on_done` processes
    what a pass computed, `on_failed` ends a sequence.
    """

    def __init__(
        self,
        pool: KVCachePool,
        executor: Executor,
        on_done: Callable[[StepPlan, StepResult], None],
        on_failed: Callable[[core.Sequence, Exception], None],
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._on_done = on_done
        self._on_failed = on_failed
        self._failed_passes = self._failed_alone = 0

    def run(self, plans: Sequence[StepPlan], views: Sequence[CacheView]) -> int:
        """Run each plan on its view; returns how many passes failed."""
        self._failed_passes = 0
        open_views = list(views)
        try:
            for plan in plans:
                view = open_views.pop(0)
                self._failed_alone = 0
                if not self._failed_passes:
                    self._attempt(plan, view)
                else:  # what failed may have been part of what this pass counted on
                    view.rollback()
                    self._retry(plan.scheduled)
        finally:
            for view in open_views:  # only when interrupted
                view.rollback()
        return self._failed_passes

    def _attempt(self, plan: StepPlan, view: CacheView) -> None:
        try:
            result = self._executor.execute(StepInput.of(plan), view)
            tokens, logprobs = len(result.token_ids), result.logprobs
            if tokens != plan.num_samples or (logprobs is not None and len(logprobs) != tokens):
                raise RuntimeError(f"{tokens} tokens came back for {plan.num_samples} sequences")
        except Exception as error:  # whatever the model raised ends sequences, not the engine
            view.rollback()
            self._failed_passes += 1
            self._isolate(plan, error)
        except BaseException:
            view.rollback()
            raise
        else:
            view.advance()
            self._failed_alone = 0
            self._on_done(plan, result)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """End the culprits of a failed pass, and run the others again."""
        entries = plan.scheduled
        named = set(getattr(error, "request_ids", ()))
        culprits = [s for s, _ in entries if s.request.request_id in named]
        if len(entries) == 1 or self._failed_alone >= _HOPELESS:
            self._failed_alone += 1
            culprits = [sequence for sequence, _ in entries]
        for sequence in culprits:
            if sequence.finish_reason is None:  # a reader may have aborted it
                self._on_failed(sequence, error)
        parts = 1 if culprits else 2
        size = -(-len(entries) // parts)
        for start in range(0, len(entries), size):
            self._retry(entries[start : start + size])

    def _retry(self, entries: Sequence[ScheduledSequence]) -> None:
        """Run entries of a pass that failed once more, those that ended excepted. Where there is no memory (for a
        copy of a block that was shared) they have the next step.
        """
        again = []
        for sequence, count in entries:
            if sequence.finish_reason is None and sequence.slot is not None:
                # Blocks that the failed pass would have filled cannot be shared: there may be more to compute.
                sequence.num_computed = self._pool.get_seq_len(sequence.slot)
                again.append(ScheduledSequence(sequence, min(count, sequence.num_uncomputed)))
        if not again:
            return
        try:
            view = self._pool.view(slots_of(s for s, _ in again), [count for _, count in again])
        except OutOfBlocksError:
            return
        self._attempt(StepPlan(tuple(again), sum(entry.samples for entry in again)), view)
