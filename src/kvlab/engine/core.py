"""The engine: one step after another, the same for every pool and policy."""

import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvlab.core import FinishReason, PoolCounters, PoolStats, Request, Sequence, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.batching import BatchBuilder, StepBatch
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.isolation import PassRunner
from kvlab.engine.outputs import OutputProcessor
from kvlab.engine.pass_results import PassResults
from kvlab.engine.protocol import EngineStats, FinishCallback, OutputCallback, StepObserver
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.step import Executor, StepResult
from kvlab.engine.step_plan import StepPlan, slots_of
from kvlab.engine.step_runs import StepRun, knows_ahead, stays_out
from kvlab.engine.text import Detokenizer
from kvlab.engine.validation import check_prompt_fits, check_queue, check_request
from kvlab.errors import RequestRefusedError
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pool import BlockPool
from kvlab.kv.protocol import KVCachePool

_MOST_WAIT_S = 0.05  # for content, with nothing to compute
_NO_STOPS: frozenset[int] = frozenset()
_log = logging.getLogger(__name__)


class EngineCore:
    """Serves requests from one pool with one scheduler and one executor.

    `eos_token_ids` end a sequence whose request does not ignore them; prompts with ids outside `vocab_size` are
    refused; with a `detokenize`, outputs carry text and requests may have stop strings (`detokenize_all` writes
    special tokens too, where a request asks for them); a `journal` that the pool writes is given the owner of each
    slot; `on_close` is called when the engine is closed. Engines share nothing: several can live in one process.
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
        detokenize_all: Detokenizer | None = None,
        journal: BlockJournal | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.pool = pool
        self._on_close = on_close
        self.scheduler = scheduler
        self.clock = clock
        self.journal = journal
        self.replica = 0  # its number in a fleet, for its records of steps
        self.observer: StepObserver | None = None
        self.lent: set[int] = set()  # slots that others read, and give back
        self._batches = BatchBuilder(
            pool, scheduler, self._fail, journal, self.lent, self._give_back, self._tells_every_token
        )
        self._runner = PassRunner(pool, executor, self._process_result, self._fail)
        self._outputs = OutputProcessor(scheduler, detokenize, detokenize_all)
        self._results = PassResults(self._outputs, scheduler, self._batches)
        self._keeping: dict[str, list[int]] = {}  # slots that outlive their requests
        self._batch = StepBatch()
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = scheduler.speculation.vocab_size = vocab_size
        self._has_text = detokenize is not None
        self._steps = self._batches_run = self._preemptions = 0
        self._is_stepping = self._is_closing = False
        self._seeds = random.Random()
        self._counters = pool.counters()  # as of the last step that was recorded
        self._stats = self._observe(pool.stats(), self._counters)

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or still holds memory after its end."""
        return self.scheduler.has_work()

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """See ServingEngine."""
        self.add_request(request, on_output, on_finish)

    def add_request(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> Sequence:
        """Queue a request and return its sequence, which changes as the engine steps; those of further samples are
        the sequence's `siblings`. For tests and for code that inspects the engine; others use `submit`.

        Raises RequestRefusedError, changing nothing, for one that can never be served or whose id is in use.
        """
        request_id, asked = request.request_id, request.sampling
        if request_id in self._outputs.requests:
            raise RequestRefusedError(f"request {request_id!r} is in the engine already")
        longest = self.pool.max_sequence_tokens
        if request.output_tokens is not None:
            room = longest - len(request.prompt_token_ids)  # servers cap what is asked for, too
            asked = replace(asked, max_tokens=max(request.expected_tokens, min(asked.max_tokens, room)))
            request = replace(request, sampling=asked)
        check_request(request, self._vocab_size, has_text=self._has_text, longest=longest)
        check_prompt_fits(request, self.scheduler.most_prompt_tokens)
        check_queue(request, self.scheduler.waiting, self.scheduler.config.max_waiting_requests)
        if asked.seed is None:
            request = replace(request, sampling=replace(asked, seed=self._seeds.getrandbits(40)))
        stops = _NO_STOPS if asked.ignore_eos else self._eos
        if asked.stop_token_ids:
            stops = stops.union(asked.stop_token_ids)
        first, *others = (Sequence(request, index=index, stop_token_ids=stops) for index in range(asked.n))
        first.siblings = others
        self._outputs.add([first, *others], on_output, on_finish)
        self.scheduler.add(first)
        self._stats = replace(self._stats, waiting=self._stats.waiting + 1)
        if self.observer is not None:
            self.observer.added(first)
        return first

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its blocks are free in the next step. False if it is not here."""
        sequences, waiting = self._outputs.requests.get(request_id), len(self.scheduler.waiting)
        for sequence in list(sequences or ()):
            if sequence.finish_reason is None:  # the callback of the one before may have ended it
                self._outputs.finish(sequence, FinishReason.ABORTED, self.clock.now())
                if sequence.swapped is not None:
                    self.pool.end_swap(sequence.swapped)
                    sequence.swapped = None
        left = waiting - len(self.scheduler.waiting)  # within a step, perhaps by one that it has just preempted
        self._stats = replace(self._stats, waiting=max(self._stats.waiting - left, 0))
        return sequences is not None

    def keep(self, request_id: str) -> None:
        """Leave a request's memory as it is when it ends, until `release`: somebody reads it then."""
        self._keeping[request_id] = []

    def release(self, request_id: str) -> None:
        """Give back what was kept of a request; nothing where nothing is."""
        for slot in self._keeping.pop(request_id, ()):
            self.pool.free_slot(slot)
            self.lent.discard(slot)
            self.scheduler.refused, self.scheduler.lacks_memory = None, False

    @property
    def is_keeping(self) -> bool:
        """Whether the memory of any request is to outlive it, or others read its blocks."""
        return bool(self._keeping or self.lent)

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        known = [when for when in (self.scheduler.next_wakeup(), self.pool.next_arrival()) if when is not None]
        return min(known, default=None)

    def stats(self) -> EngineStats:
        """See ServingEngine."""
        return self._stats

    def audit(self) -> list[Finding]:
        """See Auditable."""
        return self.pool.audit()

    def close(self) -> None:
        """See ServingEngine. Requests that have not ended are aborted. A callback's call ends behind the step."""
        for request_id in list(self._outputs.requests):
            self.abort(request_id)
        self._is_closing = self._is_stepping
        if self._is_closing:
            return
        if self.has_work():
            self.step()
        for request_id in list(self._keeping):
            self.release(request_id)
        self.pool.close()
        self.end_processes()

    def end_processes(self) -> None:
        """End what computes beside this process: the engine computes no more. For one that cannot be closed."""
        if self._on_close is not None:
            self._on_close()

    def step(self) -> StepRecord | None:
        """Run one step: give back the memory of ended sequences, admit, compute. None if nothing was to do."""
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            if self._is_closing:
                self.close()

    def _step(self) -> StepRecord | None:
        start = self.clock.now()
        before = self._counters
        expired = self.pool.expire(start)
        retired = self._retire()
        self._batches.receive(start)
        batch = self._batch = self._batches.build(start)
        plans = batch.plans(mixed=self.scheduler.config.mixed)
        if not plans and self.scheduler.leaving:  # no step runs while this one is decided: all that ended is known
            retired += self._retire(at_once=True)
            preempted, vain = batch.preempted, batch.vain
            batch = self._batch = self._batches.build(start)
            batch.preempted, batch.vain = batch.preempted + preempted, batch.vain + vain
            plans = batch.plans(mixed=self.scheduler.config.mixed)
        if not plans and not retired and not batch.preempted and not expired:
            self.pool.await_arrival(_MOST_WAIT_S)
            return None
        self._results.output_tokens -= batch.vain  # which preempted sequences had got
        running, waiting = self.scheduler.num_running, len(self.scheduler.waiting)
        views = [self.pool.view(plan.slots, plan.num_tokens) for plan in plans]
        launched = self.clock.now()
        failed_passes = self._runner.run(plans, views)
        if failed_passes:
            self._recover()
        end = self.clock.now()
        if batch.num_prefill_tokens:
            self._batches.preemption.measured(batch.num_prefill_tokens + len(batch.decoding), end - launched)
        if self.journal is not None:
            self.journal.end_step()
        self._steps += 1
        self._batches_run += batch.num_sequences > 0
        self._preemptions += batch.preempted
        pool, self._counters = self.pool.stats(), self.pool.counters()
        self._stats = self._observe(pool, self._counters)
        if self._counters.merged_blocks > before.merged_blocks:
            self.scheduler.refused = None
        record = StepRecord(
            index=self._steps - 1,
            start_s=start,
            end_s=end,
            running=running,
            waiting=waiting,
            batch_seqs=batch.num_sequences,
            prefill_tokens=batch.num_prefill_tokens,
            decode_tokens=len(batch.decoding) + batch.proposed,
            recomputed_tokens=batch.recomputed,
            preempted=batch.preempted,
            schedule_ms=(launched - start) * 1000,
            execute_ms=(end - launched) * 1000,
            failed_passes=failed_passes,
            sampled_tokens=batch.sampled,
            context_tokens=batch.context,
            attended_tokens=batch.attended,
            proposed_tokens=batch.proposed,
            accepted_tokens=batch.accepted,
            vain_tokens=batch.vain,
            replica=self.replica,
            pool=pool,
            counters=self._counters - before,
        )
        if self.observer is not None:
            self.observer.stepped(record, batch)
        return record

    def repeat(self, until_s: float = math.inf) -> StepLog:
        """See Repeating, and kvlab.engine.step_runs."""
        executor, pool, scheduler, clock = self._runner.executor, self.pool, self.scheduler, self.clock
        is_watched = self._outputs.needs_every_token or (self.observer is not None and self.observer.every_step)
        if is_watched or not (knows_ahead(executor) and isinstance(clock, LogicalClock)):
            return StepLog()
        if (repeated := scheduler.repeated()) is None or not isinstance(pool, BlockPool):
            return StepLog()
        if (arrival := pool.next_arrival()) is not None:
            until_s = min(until_s, arrival)
        decoding, chunk, refused = repeated
        if refused is not None:
            if scheduler.config.reserves_output or not stays_out(pool, decoding, refused):
                return StepLog()
            until_s = min(until_s, pool.eviction.next_expiry())  # what of its prefix expires is free for its chunk
        rest = scheduler.longest_chunk(scheduler.config.max_batched_tokens - len(decoding))
        run, before = StepRun(pool, decoding, chunk, rest), self._counters
        if not run.plan(executor, clock.now(), until_s):
            return StepLog()
        pool.expire(clock.now())
        self._retire()
        running, waiting = scheduler.num_running, len(scheduler.waiting)
        records = run.take(
            self.journal, before, index=self._steps, running=running, waiting=waiting, replica=self.replica
        )
        scheduler.began_s = records[-1].start_s
        scheduler.decoded(len(records))
        self._steps, self._batches_run = self._steps + len(records), self._batches_run + len(records)
        self._results.output_tokens += int(records.column("decode_tokens").sum())
        clock.wait_until(run.end_s)
        for sequence, token in run.ended:
            self._outputs.process(sequence, token)
        self._counters = pool.counters()
        self._stats = self._observe(pool.stats(), self._counters)
        return records

    def _tells_every_token(self) -> bool:
        """Whether a client has each token as soon as it is there."""
        return self._outputs.needs_every_token or not isinstance(self.clock, LogicalClock)

    def _retire(self, *, at_once: bool = False) -> list[Sequence]:
        """Give back the memory of the sequences that ended."""
        retired = self.scheduler.retire(at_once=at_once)
        for sequence in retired:
            self._give_back(sequence)
        return retired

    def _give_back(self, sequence: Sequence) -> None:
        """Give back the memory of one, or lend it to who asked to `keep` it."""
        (slot,) = slots_of([sequence])
        kept = self._keeping.get(sequence.request.request_id)
        if kept is None:
            self.pool.free_slot(slot)
        else:
            kept.append(slot)
            self.lent.add(slot)
        sequence.slot = None

    def _observe(self, pool: PoolStats, counters: PoolCounters) -> EngineStats:
        """What `stats` gives until the next step: made by the thread that steps, so that any may read it."""
        return EngineStats.of_pool(
            pool,
            counters,
            running=self.scheduler.num_running,
            waiting=len(self.scheduler.waiting),
            batches=self._batches_run,
            output_tokens=self._results.output_tokens,
            preemptions=self._preemptions,
        )

    def _fail(self, sequence: Sequence, error: Exception | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._outputs.finish(sequence, FinishReason.FAILED, self.clock.now(), text)

    def _recover(self) -> None:
        """After a failed pass: audit the pool, log what is wrong, free leaked blocks, sort the sequences anew."""
        findings = self.pool.audit()
        for finding in findings:
            _log.error("audit after a failed pass: %s", finding)
        if findings:
            self.pool.reclaim_leaked_blocks()
        self.scheduler.resync()

    def _process_result(self, plan: StepPlan, result: StepResult, accepted: NDArray[np.int64] | None) -> None:
        if result.elapsed_s is not None and isinstance(self.clock, LogicalClock):
            self.clock.advance(result.elapsed_s)
        self._results.process(self._batch, plan, result, accepted, self.clock.now())
