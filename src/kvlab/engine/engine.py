"""The engine: one step after another, the same for every pool and policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvlab.core import (
    FinishReason,
    Request,
    Sequence,
    SequenceStatus,
    StepOutput,
    StepPlan,
    StepRecord,
)
from kvlab.engine.clock import Clock
from kvlab.engine.executor import Executor
from kvlab.engine.refusal import check_sampling
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.text import Detokenizer, TextStream
from kvlab.errors import OutOfBlocksError, RequestRefusedError
from kvlab.kv.protocol import CachePoolProtocol
from kvlab.kv.view import CacheView

Sink = Callable[[StepOutput], None]


class Engine:
    """Serves requests from one pool with one scheduler and one executor.

    `eos_token_ids` end a sequence whose request does not ignore them; prompts with ids outside `vocab_size` are
    refused; with a `detokenize`, outputs carry text and requests may have stop strings. Engines share nothing:
    several can live in one process.
    """

    def __init__(
        self,
        pool: CachePoolProtocol,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
        detokenize: Detokenizer | None = None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.clock = clock
        self._executor = executor
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._detokenize = detokenize
        self._live: dict[str, list[Sequence]] = {}  # the sequences of each request that have not ended
        self._sinks: dict[str, Sink] = {}
        self._texts: dict[Sequence, TextStream] = {}  # of the live sequences, with a detokenizer
        self._steps = 0
        self._seeds = random.Random()

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or still holds memory after its end."""
        return self.scheduler.has_work()

    def submit(self, request: Request, sink: Sink | None = None) -> Sequence:
        """Queue a request; `sink` is given each of its tokens and its end. Returns its sequence; those of further
        samples are the sequence's `siblings`.

        Raises RequestRefusedError, changing nothing, for one that can never be served or whose id is in use.
        """
        if request.request_id in self._live:
            raise RequestRefusedError(f"request {request.request_id!r} is in the engine already")
        if not request.prompt_token_ids:
            raise RequestRefusedError(f"request {request.request_id!r}: an empty prompt")
        if self._vocab_size is not None:
            low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
            if low < 0 or high >= self._vocab_size:
                raise RequestRefusedError(
                    f"request {request.request_id!r}: token id {low if low < 0 else high} is outside the "
                    f"vocabulary of {self._vocab_size}"
                )
        check_sampling(
            request.request_id,
            request.sampling,
            vocab_size=self._vocab_size,
            has_text=self._detokenize is not None,
        )
        if request.max_total_tokens > self.pool.max_sequence_tokens:
            raise RequestRefusedError(
                f"request {request.request_id!r}: {len(request.prompt_token_ids)} prompt tokens + "
                f"{request.sampling.max_tokens} output tokens can never fit; the pool takes sequences of up to "
                f"{self.pool.max_sequence_tokens} tokens"
            )
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
        if sink is not None:
            self._sinks[request.request_id] = sink
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
        """When to step again after a step that had nothing to run; None: when a request arrives."""
        return self.scheduler.next_wakeup()

    def step(self) -> StepRecord | None:
        """Run one step: give back the memory of ended sequences, admit, compute. None if nothing was to do."""
        start = self.clock.now()
        before = self.pool.stats()
        retired = self.scheduler.retire()
        for sequence in retired:
            self._release(sequence)
        self.scheduler.open_admission(start)
        plan, preempted = self._reserve(self.scheduler.plan())
        if not preempted:  # who enters now would take what running sequences just gave up
            plan = self._admit(plan, start)
        if not plan.scheduled and not retired:
            return None
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        decode_tokens = plan.num_decode_tokens
        view = self._view(plan)
        launched = self.clock.now()
        recomputed = self._run(plan, view) if plan.scheduled else 0
        end = self.clock.now()
        after = self.pool.stats()
        self._steps += 1
        return StepRecord(
            index=self._steps - 1,
            start_s=start,
            end_s=end,
            running=running,
            waiting=waiting,
            batch_seqs=len(plan.scheduled),
            prefill_tokens=plan.num_tokens - decode_tokens,
            decode_tokens=decode_tokens,
            recomputed_tokens=recomputed,
            preempted=preempted,
            blocks_total=after.blocks_total,
            blocks_in_use=after.blocks_in_use,
            block_token_slots=after.block_size,
            tokens_in_use=after.tokens_stored,
            blocks_cached=after.blocks_cached,
            shared_blocks=after.shared_blocks,
            blocks_allocated=after.blocks_allocated - before.blocks_allocated,
            blocks_freed=after.blocks_freed - before.blocks_freed,
            evictions=after.evictions - before.evictions,
            evicted_blocks=after.evicted_blocks - before.evicted_blocks,
            cow_copies=after.cow_copies - before.cow_copies,
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            hit_tokens=after.hit_tokens - before.hit_tokens,
            same_step_hit_tokens=after.same_step_hit_tokens - before.same_step_hit_tokens,
            recompute_hit_tokens=after.recompute_hit_tokens - before.recompute_hit_tokens,
            schedule_ms=(launched - start) * 1000,
            execute_ms=(end - launched) * 1000,
        )

    def _view(self, plan: StepPlan) -> CacheView:
        slots = [_slot(entry.sequence) for entry in plan.scheduled]
        return self.pool.view(slots, [entry.num_tokens for entry in plan.scheduled])

    def _run(self, plan: StepPlan, view: CacheView) -> int:
        """Compute the plan's batch; returns how many of its tokens had been computed before."""
        try:
            tokens = self._executor.execute(plan, view)
        except Exception as error:  # whatever the model raised ends this step's sequences, not the engine
            view.rollback()
            for entry in plan.scheduled:
                if entry.sequence.finish_reason is None:
                    self._finish(entry.sequence, FinishReason.FAILED, f"{type(error).__name__}: {error}")
            return 0
        except BaseException:
            view.rollback()
            raise
        view.advance()
        return self._account(plan, tokens)

    def _admit(self, plan: StepPlan, now: float) -> StepPlan:
        """Let sequences enter while there are tokens in the step's budget and memory for all they have to compute.

        Each is reserved at once, so that the next may share the blocks that it fills in this very step.
        """
        budget = self.scheduler.config.max_batched_tokens - plan.num_tokens
        entered = []
        free = self.pool.free_token_capacity()
        while budget > 0 and (sequence := self.scheduler.candidate()) is not None:
            try:
                sequence.slot = self.pool.allocate_slot(
                    token_ids=sequence.token_ids,
                    salt=sequence.request.salt,
                    keep_free=-(-self.scheduler.headroom(free) // self.pool.block_size),
                    resumed=sequence.preemptions > 0,
                )
            except OutOfBlocksError:
                break
            self.scheduler.admit(sequence)
            sequence.num_computed = self.pool.get_seq_len(sequence.slot)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                sequence.cached_tokens = sequence.num_computed
            entry = self.scheduler.chunk(sequence, budget)
            self.pool.reserve([sequence.slot], [entry.num_tokens])
            budget -= entry.num_tokens
            entered.append(entry)
        return StepPlan((*plan.scheduled, *entered))

    def _reserve(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """Make room for the plan, preempting sequences until it fits. Returns what is left of the plan, and how
        many were preempted.
        """
        preempted = 0
        while plan.scheduled:
            try:
                self.pool.reserve(
                    [_slot(entry.sequence) for entry in plan.scheduled],
                    [entry.num_tokens for entry in plan.scheduled],
                )
            except OutOfBlocksError as error:
                victim = self.scheduler.victim()
                if len(self.scheduler.running) == 1:
                    self._finish(victim, FinishReason.FAILED, str(error))
                    plan = StepPlan(())
                    break
                self.pool.free_slot(_slot(victim))
                victim.slot = None
                victim.preemptions += 1
                self.scheduler.preempt(victim)
                preempted += 1
                plan = StepPlan(tuple(e for e in plan.scheduled if e.sequence is not victim))
            else:
                break
        return plan, preempted

    def _account(self, plan: StepPlan, tokens: list[int]) -> int:
        """Book what the step computed; returns how many of its tokens had been computed before."""
        now = self.clock.now()
        recomputed = 0
        sampled = iter(tokens)
        grown: list[Sequence] = []
        for entry in plan.scheduled:
            sequence = entry.sequence
            samples = entry.samples
            again = max(0, min(sequence.high_water - sequence.num_computed, entry.num_tokens))
            sequence.num_computed += entry.num_tokens
            sequence.high_water = max(sequence.high_water, sequence.num_computed)
            sequence.recomputed_tokens += again
            recomputed += again
            if not samples:
                continue
            token = next(sampled)
            if sequence.finish_reason is not None:  # aborted by whoever read another's token of this step
                continue
            if sequence.siblings and not sequence.num_output_tokens:
                self._fork(sequence)
            self._append(sequence, token, now)
            grown.append(sequence)
        self.pool.extend_tokens([_slot(s) for s in grown], [s.token_ids[-1] for s in grown])
        return recomputed

    def _fork(self, first: Sequence) -> None:
        """The prompt is computed: let the request's other samples start from it. Those that find no room wait at
        the front of the queue.
        """
        waiting = []
        for sequence in first.siblings:
            try:
                if self.scheduler.has_room():
                    sequence.slot = self.pool.fork_slot(_slot(first), rerun_last=True)
            except OutOfBlocksError:
                pass
            if sequence.slot is None:
                waiting.append(sequence)
                continue
            sequence.num_computed = self.pool.get_seq_len(sequence.slot)
            sequence.high_water = sequence.num_computed
            sequence.scheduled_s = first.scheduled_s
            self.scheduler.join(sequence)
        self.scheduler.put_first(waiting)

    def _append(self, sequence: Sequence, token: int, now: float) -> None:
        sequence.token_ids.append(token)
        sequence.token_times_s.append(now)
        if sequence.next_logprobs is not None:
            sequence.logprobs.append(sequence.next_logprobs)
            sequence.next_logprobs = None
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
        elif sequence.num_output_tokens >= sequence.request.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, token=token, text=text)
        else:
            self._emit(sequence, token, text)

    def _emit(self, sequence: Sequence, token: int, text: str) -> None:
        """Hand a token to the request's reader; one that raises ends its own sequence alone."""
        request_id = sequence.request.request_id
        sink = self._sinks.get(request_id)
        if sink is None:
            return
        logprobs = sequence.logprobs[-1] if sequence.logprobs else None
        try:
            sink(StepOutput(request_id, token, index=sequence.index, text=text, logprobs=logprobs))
        except Exception as error:
            if sequence.finish_reason is None:
                reader = f"its reader raised {type(error).__name__}: {error}"
                self._finish(sequence, FinishReason.FAILED, reader)

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
        sink = self._sinks.get(request_id)
        live = self._live[request_id]
        live.remove(sequence)
        if not live:
            del self._live[request_id]
            self._sinks.pop(request_id, None)
        if sequence in self._texts:
            with suppress(Exception):  # a detokenizer that fails has nothing left to tell
                rest = self._texts.pop(sequence).close()
                sequence.text += rest
                text += rest
        logprobs = sequence.logprobs[-1] if token is not None and sequence.logprobs else None
        if sink is not None:  # late, since it may abort another request or submit one
            with suppress(Exception):  # the sequence has ended; its reader can do it no more harm
                sink(StepOutput(request_id, token, reason, error, sequence.index, text, logprobs))
        if reason is FinishReason.FAILED and not sequence.num_output_tokens:
            # Samples that were to start from this one have nothing to start from.
            for sibling in sequence.siblings:
                if sibling.finish_reason is None and sibling.slot is None:
                    self.scheduler.drop(sibling)
                    self._finish(sibling, reason, error)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free_slot(_slot(sequence))
        sequence.slot = None


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise RuntimeError(f"request {sequence.request.request_id!r} runs without a slot")
    return sequence.slot
