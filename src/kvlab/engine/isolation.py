"""Runs a step's forward passes so that a failure ends only the sequences that cause it."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab import core
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.engine.step_plan import Chunk, DecodeBatch, StepPlan
from kvlab.errors import EngineStoppedError, OutOfBlocksError
from kvlab.kv.protocol import KVCachePool
from kvlab.kv.view import CacheView

_MAX_FAILED_ALONE = 8  # sequences, one after the other, before the fault is the device's


class PassRunner:
    """Executes passes; each that raises is rolled back and run again in two halves, down to single sequences.

    If an error names the requests that caused it (`request_ids`), those end. Finding one of B otherwise takes
    2 log2(B) more passes; a fault that does not come back ends none. Where sequence after sequence fails alone and
    nothing succeeds in between, the device is at fault: then a part that fails is not divided further, and ends.
    `on_done` processes what a pass computed, with how many of each sequence's proposals were accepted where there
    are any; `on_failed` ends a sequence. What is run again is run without proposals.
    """

    def __init__(
        self,
        pool: KVCachePool,
        executor: Executor,
        on_done: Callable[[StepPlan, StepResult, NDArray[np.int64] | None], None],
        on_failed: Callable[[core.Sequence, Exception], None],
    ) -> None:
        self._pool = pool
        self.executor = executor
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
                else:  # its sequences may share blocks that the failed pass would have filled
                    view.rollback()
                    self._retry(plan.sequences, plan.num_tokens.tolist())
        finally:
            for view in open_views:  # only when interrupted
                view.rollback()
        return self._failed_passes

    def _attempt(self, plan: StepPlan, view: CacheView) -> None:
        try:
            step = StepInput.of(plan)
            result = self.executor.execute(step, view)
            lengths = {len(column) for column in (result.token_ids, result.logprobs) if column is not None}
            if lengths != {step.num_rows}:
                raise RuntimeError(f"{len(result.token_ids)} tokens came back for {step.num_rows} rows of logits")
            wanted = 0 if step.scored is None else len(step.scored.rows)
            if len(result.prompt_logprobs) not in (0, wanted):  # none at all of a modelled device
                raise RuntimeError(
                    f"{len(result.prompt_logprobs)} log-probabilities came back for {wanted} prompt tokens"
                )
            accepted = kept = None
            if step.proposed is not None:
                accepted = step.count_accepted(result.token_ids)
                kept = step.num_tokens - step.proposed + accepted
        except EngineStoppedError:  # a process that computes with this one has ended
            view.rollback()
            raise
        except Exception as error:  # whatever else the model raised ends sequences, not the engine
            view.rollback()
            self._failed_passes += 1
            self._isolate(plan, error)
        except BaseException:
            view.rollback()
            raise
        else:
            view.advance(kept)
            self._failed_alone = 0
            self._on_done(plan, result, accepted)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """End the culprits of a failed pass, and run the others again."""
        sequences, counts = plan.sequences, plan.num_tokens.tolist()
        named = set(getattr(error, "request_ids", ()))
        culprits = [sequence for sequence in sequences if sequence.request.request_id in named]
        if len(sequences) == 1 or self._failed_alone >= _MAX_FAILED_ALONE:
            self._failed_alone += 1
            culprits = sequences
        for sequence in culprits:
            if sequence.finish_reason is None:  # a callback may have aborted it
                self._on_failed(sequence, error)
        parts = 1 if culprits else 2
        size = -(-len(sequences) // parts)
        for start in range(0, len(sequences), size):
            self._retry(sequences[start : start + size], counts[start : start + size])

    def _retry(self, sequences: Sequence[core.Sequence], counts: Sequence[int]) -> None:
        """Run sequences of a failed pass once more, those that ended excepted. Where there is no memory (for a copy
        of a block that was shared) they have the next step.
        """
        again = []
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.finish_reason is None and sequence.slot is not None:
                computed = self._pool.get_seq_len(sequence.slot)
                if computed != sequence.num_computed:  # it shared blocks that the failed pass would have filled
                    sequence.rewind(computed)
                again.append(Chunk(sequence, min(count, sequence.num_uncomputed)))
        if not again:
            return
        plan = StepPlan(DecodeBatch(), again)
        try:
            view = self._pool.view(plan.slots, plan.num_tokens)
        except OutOfBlocksError:
            return
        self._attempt(plan, view)
