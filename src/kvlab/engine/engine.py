"""The engine: one step after another, the same for every pool and policy."""

from __future__ import annotations

import logging
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat

from kvlab.core import (
    FinishReason,
    Request,
    Sequence,
    SequenceStatus,
    StepOutput,
    StepPlan,
    StepRecord,
)
from kvlab.engine.batching import BatchBuilder, slot_of, slots_of
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.isolation import PassRunner
from kvlab.engine.protocol import EngineStats, FinishCallback, OutputCallback
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.step import Executor, StepResult
from kvlab.engine.text import Detokenizer, TextStream
from kvlab.engine.validation import check_deadline, check_fits, check_prompt, check_queue, check_sampling
from kvlab.errors import OutOfBlocksError, RequestRefusedError
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal
from kvlab.kv.protocol import KVCachePool
from kvlab.kv.view import CacheView

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Booked:
    """What the passes of a step computed, in tokens; see StepRecord."""

    recomputed: int = 0
    sampled: int = 0
    context: int = 0
    attended: int = 0


class Engine:
    """Serves requests from one pool with one scheduler and one executor.

    `eos_token_ids` end a sequence whose request does not ignore them; prompts with ids outside `vocab_size` are
    refused; with a `detokenize`, outputs carry text and requests may have stop strings; a `journal` that the pool
    writes is given the owner of each slot. Engines share nothing: several can live in one process.
    """

    def __init__(
        self,
        pool: KVCachePool,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
        detokenize: Detokenizer | None = None,
        journal: BlockJournal | None = None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.clock = clock
        self._composer = BatchBuilder(pool, scheduler, self._fail, journal)
        self._runner = PassRunner(pool, executor, self._account, self._fail)
        self._booked = _Booked()
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._detokenize = detokenize
        self._live: dict[str, list[Sequence]] = {}  # the sequences of each request that have not ended
        self._readers: dict[str, OutputCallback] = {}
        self._on_finish: dict[str, FinishCallback] = {}
        self._texts: dict[Sequence, TextStream] = {}  # of the live sequences, with a detokenizer
        self.journal = journal
        self._steps = self._output_tokens = self._preemptions = 0
        self._seeds = random.Random()

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or still holds memory after its end."""
        return self.scheduler.has_work()

    def submit(
        self,
        request: Request,
        on_output: OutputCallback | None = None,
        on_finish: FinishCallback | None = None,
    ) -> None:
        """See ServingEngine."""
        self.add_request(request, on_output, on_finish)

    def add_request(
        self,
        request: Request,
        on_output: OutputCallback | None = None,
        on_finish: FinishCallback | None = None,
    ) -> Sequence:
        """Queue a request and return its sequence, which changes as the engine steps; those of further samples are
        the sequence's `siblings`. For tests and for who looks into the engine; others use `submit`.

        Raises RequestRefusedError, changing nothing, for one that can never be served or whose id is in use.
        """
        if request.request_id in self._live:
            raise RequestRefusedError(f"request {request.request_id!r} is in the engine already")
        check_prompt(request, self._vocab_size)
        check_sampling(
            request.request_id,
            request.sampling,
            vocab_size=self._vocab_size,
            has_text=self._detokenize is not None,
        )
        check_deadline(request)
        check_fits(request, self.pool.max_sequence_tokens)
        check_queue(request, self.scheduler.waiting, self.scheduler.config.max_waiting_requests)
        if request.sampling.seed is None:
            sampling = replace(request.sampling, seed=self._seeds.getrandbits(40))
            request = replace(request, sampling=sampling)
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= self._eos
        sequence, *others = (
            Sequence(request, index=index, stop_token_ids=stops) for index in range(request.sampling.n)
        )
        sequence.siblings = others
        self._live[request.request_id] = [sequence, *others]
        if self._detokenize is not None:
            for each in (sequence, *others):
                self._texts[each] = TextStream(
                    self._detokenize,
                    request.prompt_token_ids,
                    request.sampling.stop,
                    request.sampling.min_tokens,
                )
        if on_output is not None:
            self._readers[request.request_id] = on_output
        if on_finish is not None:
            self._on_finish[request.request_id] = on_finish
        self.scheduler.add(sequence)
        return sequence

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its blocks are free in the next step. False if it is not here."""
        if request_id not in self._live:
            return False
        for sequence in list(self._live[request_id]):
            if sequence.finish_reason is None:  # a reader of the one before may have been faster
                self.scheduler.drop(sequence)
                self._finish(sequence, FinishReason.ABORTED)
        return True

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        return self.scheduler.next_wakeup()

    def stats(self) -> EngineStats:
        """See ServingEngine."""
        pool, counters = self.pool.stats(), self.pool.counters()
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prompt_tokens=counters.prompt_tokens,
            output_tokens=self._output_tokens,
            hit_tokens=counters.hit_tokens,
            preemptions=self._preemptions,
            blocks_total=pool.blocks_total,
            blocks_in_use=pool.blocks_in_use,
            tokens_in_use=pool.tokens_stored,
        )

    def audit(self) -> list[Finding]:
        """See Auditable."""
        return self.pool.audit()

    def close(self) -> None:
        """See ServingEngine. Requests that have not ended are aborted."""
        for request_id in list(self._live):
            self.abort(request_id)
        if self.has_work():
            self.step()

    def step(self) -> StepRecord | None:
        """Run one step: give back the memory of ended sequences, admit, compute. None if nothing was to do."""
        start = self.clock.now()
        before = self.pool.counters()
        retired = self.scheduler.retire()
        for sequence in retired:
            self._release(sequence)
        batch = self._composer.compose(start)
        plans = batch.plans(mixed=self.scheduler.config.mixed)
        if not plans and not retired and not batch.preempted:
            return None
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        views = [self._view(plan) for plan in plans]
        launched = self.clock.now()
        booked = self._booked = _Booked()
        failed_passes = self._runner.run(plans, views)
        if failed_passes:
            self._recover()
        end = self.clock.now()
        if self.journal is not None:
            self.journal.end_step()
        self._steps += 1
        self._preemptions += batch.preempted
        return StepRecord(
            index=self._steps - 1,
            start_s=start,
            end_s=end,
            running=running,
            waiting=waiting,
            batch_seqs=sum(len(plan.scheduled) for plan in plans),
            prefill_tokens=batch.num_prefill_tokens(),
            decode_tokens=batch.num_decode_tokens(),
            recomputed_tokens=booked.recomputed,
            preempted=batch.preempted,
            schedule_ms=(launched - start) * 1000,
            execute_ms=(end - launched) * 1000,
            failed_passes=failed_passes,
            sampled_tokens=booked.sampled,
            context_tokens=booked.context,
            attended_tokens=booked.attended,
            pool=self.pool.stats(),
            counters=self.pool.counters() - before,
        )

    def _view(self, plan: StepPlan) -> CacheView:
        slots = slots_of(sequence for sequence, _ in plan.scheduled)
        return self.pool.view(slots, [count for _, count in plan.scheduled])

    def _fail(self, sequence: Sequence, error: Exception | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._finish(sequence, FinishReason.FAILED, text)

    def _recover(self) -> None:
        """After a failed pass: the pool has to be sound. What is not is logged, and leaked blocks are freed."""
        findings = self.pool.audit()
        for finding in findings:
            _log.error("audit after a failed pass: %s", finding)
        if findings:
            self.pool.reclaim_leaked_blocks()

    def _account(self, plan: StepPlan, result: StepResult) -> None:
        """Book what a pass computed."""
        if result.elapsed_s is not None and isinstance(self.clock, LogicalClock):
            self.clock.advance(result.elapsed_s)
        now = self.clock.now()
        booked = self._booked
        booked.sampled += len(result.token_ids)
        sampled = zip(result.token_ids, result.logprobs or repeat(None), strict=False)
        silent = self._detokenize is None and not self._readers  # nobody waits for a token of this pass
        for sequence, count in plan.scheduled:
            before, known = sequence.num_computed, len(sequence.token_ids)
            sequence.num_computed = after = before + count
            booked.context += after
            booked.attended += count * (before + after + 1) // 2  # before + 1, before + 2, ..., after
            if after > sequence.high_water:
                again = max(sequence.high_water - before, 0)
                sequence.high_water = after
            else:
                again = count
            if again:
                sequence.recomputed_tokens += again
                booked.recomputed += again
            if after != known:
                continue
            token, logprobs = next(sampled)
            if sequence.finish_reason is not None:  # aborted by whoever read another's token of this step
                continue
            if sequence.siblings and known == sequence.num_prompt_tokens:
                self._fork(sequence)
            sequence.token_ids.append(token)
            sequence.token_times_s.append(now)
            self._output_tokens += 1
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            goes_on = known + 1 < sequence.max_total_tokens and token not in sequence.stop_token_ids
            if not (silent and goes_on):
                self._tell(sequence, token)

    def _fork(self, first: Sequence) -> None:
        """The prompt is computed: let the request's other samples start from it. Those that find no room wait at
        the front of the queue.
        """
        waiting = []
        for sequence in first.siblings:
            try:
                if self.scheduler.has_room():
                    sequence.slot = self.pool.fork_slot(slot_of(first), sequence.token_ids, rerun_last=True)
            except OutOfBlocksError:
                pass
            if sequence.slot is None:
                waiting.append(sequence)
                continue
            sequence.num_computed = self.pool.get_seq_len(sequence.slot)
            sequence.high_water = sequence.num_computed
            sequence.scheduled_s = first.scheduled_s
            if self.journal is not None:
                self.journal.assign(sequence.slot, sequence.key)
            self.scheduler.join(sequence)
        self.scheduler.put_first(waiting)

    def _tell(self, sequence: Sequence, token: int) -> None:
        """Hand out a sequence's newest token, and end the sequence if it was its last."""
        if token in sequence.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, token=token)
            return
        text, stopped = "", False
        if self._detokenize is not None:
            try:
                text, stopped = self._texts[sequence].add(token)
            except Exception as error:
                reason = f"its detokenizer raised {type(error).__name__}: {error}"
                self._finish(sequence, FinishReason.FAILED, reason, token)
                return
            sequence.text += text
        if stopped:
            self._finish(sequence, FinishReason.STOP, token=token, text=text)
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            self._finish(sequence, FinishReason.LENGTH, token=token, text=text)
        elif self._readers:
            self._emit(sequence, token, text)

    def _emit(self, sequence: Sequence, token: int, text: str) -> None:
        """Hand a token to the request's reader; one that raises ends its own sequence alone."""
        request_id = sequence.request.request_id
        reader = self._readers.get(request_id)
        if reader is None:
            return
        logprobs = sequence.logprobs[-1] if sequence.logprobs else None
        try:
            reader(StepOutput(request_id, token, index=sequence.index, text=text, logprobs=logprobs))
        except Exception as error:
            if sequence.finish_reason is None:
                reason = f"its reader raised {type(error).__name__}: {error}"
                self._finish(sequence, FinishReason.FAILED, reason)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        token: int | None = None,
        text: str = "",
    ) -> None:
        """End a sequence; `token` and `text` are those it ended with, which its reader has not been given yet."""
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        sequence.finished_s = self.clock.now() if token is None else sequence.token_times_s[-1]
        request_id = sequence.request.request_id
        reader = self._readers.get(request_id)
        live = self._live[request_id]
        on_finish = self._on_finish.get(request_id)
        live.remove(sequence)
        if not live:
            del self._live[request_id]
            self._readers.pop(request_id, None)
            self._on_finish.pop(request_id, None)
        if sequence in self._texts:
            with suppress(Exception):  # a detokenizer that fails has nothing left to tell
                rest = self._texts.pop(sequence).close()
                sequence.text += rest
                text += rest
        logprobs = sequence.logprobs[-1] if token is not None and sequence.logprobs else None
        if reader is not None:  # late, since it may abort another request or submit one
            with suppress(Exception):  # the sequence has ended; its reader can do it no more harm
                reader(StepOutput(request_id, token, reason, error, sequence.index, text, logprobs))
        if on_finish is not None:
            on_finish(sequence.record())
        if reason is FinishReason.FAILED and not sequence.num_output_tokens:
            # Samples that were to start from this one have nothing to start from.
            for sibling in sequence.siblings:
                if sibling.finish_reason is None and sibling.slot is None:
                    self.scheduler.drop(sibling)
                    self._finish(sibling, reason, error)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free_slot(slot_of(sequence))
        sequence.slot = None
