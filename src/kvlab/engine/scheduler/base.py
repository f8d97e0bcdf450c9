"""The scheduler: its policy says when sequences may be admitted, its order which goes first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter

from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, Sequence, SequenceStatus
from kvlab.engine.scheduler.answers import check_chosen, check_stages, check_victim, decoding_of
from kvlab.engine.scheduler.decoders import Decoders
from kvlab.engine.scheduler.orders import ORDERS, Order, Stage, StepState
from kvlab.engine.scheduler.victims import VICTIM_OF, VICTIMS
from kvlab.engine.scheduler.waiting_queue import WaitingQueue
from kvlab.engine.speculation import Speculation
from kvlab.engine.step_plan import Chunk, DecodeBatch
from kvlab.registry import Registry

POLICIES: Registry[type[Scheduler]] = Registry("scheduler.policy")


@POLICIES.register("continuous")
class Scheduler:
    """The sequences that wait and those that run. Unless a subclass says otherwise sequences are admitted and leave
    in every step (continuous batching: Orca, OSDI 2022).

        add -> waiting --admit--> running --retire--> gone
                  ^______preempt______|

    A sequence that found content in a tier is among the running ones while that is loaded, and computes nothing.

    It knows sequences and budgets, never the pool: the engine asks it for the plan of each of the order's `stages`
    and for a `candidate` to admit, tries to get their memory, and calls `admit` or `preempt`. `running` is in the
    order of admission.
    """

    lacks_memory = False  # none is tried, as there was no memory for one in an earlier step
    shares_within_step = True  # a sequence that is admitted finds the blocks that one before it fills in this step
    takes_whole_prompt = False  # with all its blocks, not those of its first chunk
    most_prompt_tokens: int | None = None  # of a prompt that can be computed; None: any number

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.order = ORDERS.get(config.order)(config)
        check_stages(self.order, config)
        self.waiting = WaitingQueue(self.order.rank)
        self.running: list[Sequence] = []
        self._admissions = 0
        self._victim = VICTIMS.get(config.preemption.victim or VICTIM_OF.get(config.order, "last_admitted"))
        self.speculation = Speculation(config.speculation)
        self._longest_chunk = config.long_prefill_threshold or config.max_batched_tokens
        self._open = False
        self._state = StepState(0.0, lambda sequence: 0)
        self.began_s = 0.0  # the step before: what arrived earlier is known to the one that is decided then
        self._known_s = 0.0  # what arrived before then may be admitted
        self._waited = 0  # steps that prompts have waited for more of them
        self.ended: list[Sequence] = []  # since the last retirement
        self.leaving: list[Sequence] = []  # `ahead`: that ended after the coming step was decided
        #: For whom there was no memory in the last step, that only decoded; none was given back since.
        self.refused: Sequence | None = None
        self._prefilling: list[Sequence] = []
        self._loading: dict[int, Sequence] = {}  # by slot
        self._continuing: list[Sequence] = []  # those in prefill when the step began
        self._decoders = Decoders()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        self.waiting.add(sequence)

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or has ended without having been retired."""
        return bool(self.running) or len(self.waiting) > 0

    @property
    def num_running(self) -> int:
        """How many sequences run, without those that only have their memory still."""
        return len(self.running) - len(self.leaving)

    def retire(self, *, at_once: bool = False) -> list[Sequence]:
        """Take the sequences that ended out of the running ones, and return them. Where steps are decided `ahead`
        the coming one was, before the last ended: those that ended in it stay for one step more, unless `at_once`.
        """
        ended, self.ended = [sequence for sequence in self.ended if sequence.slot is not None], []
        if ended:
            self._prefilling = [each for each in self._prefilling if each.status is not SequenceStatus.FINISHED]
        if self.config.ahead and not at_once:
            ended, self.leaving = self.leaving, ended
        else:
            ended, self.leaving = [*self.leaving, *ended], []
        for sequence in ended:
            self._stop(sequence)
            self.refused = None
        return ended

    def retire_early(self, sequence: Sequence) -> None:
        """Take one of those that are `leaving` out of the running ones: its memory is needed."""
        self.leaving.remove(sequence)
        self._stop(sequence)

    def begin_step(self, now: float, cached_tokens: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        """Decide which sequences could decode, which are in prefill, and whether waiting ones may be admitted.

        `cached_tokens`: how many tokens of a sequence are in the prefix cache; called at most once for each.
        """
        self.refused = None
        self._state = StepState(now, cache(cached_tokens))
        is_known = not self.config.ahead or not self.running
        self._known_s = math.inf if is_known else self.began_s
        self.began_s = math.nextafter(now, math.inf) if is_known else now  # two are decided at once then
        self._decoders.update()
        self._open = len(self.waiting) > 0 and self.may_admit(now) and not self._waits_for_more()
        self._continuing = list(self._prefilling)

    def plan_decode(self, budget: int) -> DecodeBatch:
        """The running sequences that decode in the step: at most `budget`."""
        return self._decoders.plan(lambda decoding: decoding_of(self.order, self.config, decoding, budget))

    def propose(self, decoding: DecodeBatch, budget: int) -> dict[int, list[int]]:
        """Tokens that may follow those of sequences that decode, by slot: at most `budget`."""
        return self.speculation.propose(decoding.sequences, budget)

    def plan_prefill(self, budget: int) -> list[Chunk]:
        """The running sequences that are in prefill, and a chunk for each, with at most `budget` tokens in all."""
        chunks = []
        for sequence in sorted(self._continuing, key=self.order.rank):
            if budget > 0 and sequence.status is SequenceStatus.RUNNING:
                chunk = self.chunk(sequence, budget)
                budget -= chunk.num_tokens
                chunks += [chunk] if chunk.num_tokens else []
        return chunks

    def chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """How many of a prefilling sequence's tokens a step with this budget left takes."""
        return Chunk(sequence, min(sequence.num_uncomputed, self.longest_chunk(budget)))

    def charged(self, chunk: Chunk) -> int:
        """What the first chunk of an admitted sequence takes of the step's budget."""
        return chunk.num_tokens

    def fits_step(self, sequence: Sequence, budget: int) -> bool:
        """Whether a step with this budget left, at least 1, takes any tokens of a candidate."""
        return True

    def first_chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a candidate behind those that are found, for which there are to be blocks in this step."""
        return self.longest_chunk(budget)

    def longest_chunk(self, budget: int) -> int:
        """Most of a sequence's tokens that a step with this budget left takes."""
        return min(budget, self._longest_chunk)

    def repeated(self) -> tuple[DecodeBatch, Chunk | None, Sequence | None] | None:
        """What the coming steps all consist of, one like another, until a sequence ends, one arrives or memory runs
        out: those that decode, and a chunk of a prompt that each step goes on with; as long as there is no memory
        for the last, which waits. None: steps may differ. Those that have ended are to be retired before.
        """
        self._decoders.update()
        budget, decoding = self.config.max_batched_tokens, len(self._decoders.batch)
        whole, decode_first = type(self.order).decoding is Order.decoding, self.order.stages[0] is Stage.DECODE
        if (
            self._decoders.is_stale
            or not whole
            or not decoding
            or decoding > budget
            or len(self._prefilling) > decode_first
        ):
            return None
        if self.config.speculation.method is not None or self._waited:  # which a step counts on, or ends
            return None
        if self.config.ahead and (self.ended or (self.leaving and len(self.waiting))):  # their memory comes back
            return None
        chunk = None
        if self._prefilling:
            chunk = self.chunk(self._prefilling[0], budget - decoding)
            if chunk.sequence.status is not SequenceStatus.RUNNING:  # its user aborted it
                return None
            if not 0 < chunk.num_tokens < chunk.sequence.num_uncomputed or not self.config.mixed:
                return None
            budget -= chunk.num_tokens
        leaving = sum(sequence.slot is not None for sequence in self.ended)
        has_room = len(self.running) - leaving < self.config.max_batch_size
        has_room &= self.may_admit(math.inf)
        if not (len(self.waiting) and has_room and (budget > decoding or not decode_first)):
            return self._decoders.batch, chunk, None
        is_refused = self.refused is not None and self.refused is self.waiting.head
        is_refused &= not self.config.prefill_wait_steps  # which steps count on
        if chunk is not None or not is_refused or type(self.order).choose is not Order.choose:
            return None
        return self._decoders.batch, None, self.refused

    def num_decoding(self) -> int:
        """How many running sequences could decode in this step."""
        return len(self._decoders.batch)

    def candidate(self) -> Sequence | None:
        """The sequence to admit next, where the policy and `max_batch_size` let one. If it does not fit, none is
        admitted in its place.
        """
        if not self._open or not self.has_room():
            return None
        sequence = self._chosen()
        return None if sequence is None or self.is_late(sequence) else sequence

    def _chosen(self) -> Sequence | None:
        """The waiting sequence that the order wants next. Raises ConfigError for anything else."""
        count = len(self.waiting)
        sequence = self.order.choose(self.waiting, self._state)
        check_chosen(sequence, self.waiting, count, self.config)
        return sequence

    def is_late(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence came when the coming step was decided already."""
        return sequence.request.arrival_s >= self._known_s

    def _waits_for_more(self) -> bool:
        """Whether prompts that could be admitted wait, while others decode, for more of them."""
        config, decoding = self.config, len(self._decoders.batch)
        if not config.prefill_wait_steps or not decoding or self._prefilling:
            return False
        room = config.max_batch_size - len(self.running)
        prompts = [len(sequence.token_ids) for sequence, _ in zip(self.waiting, range(room), strict=False)]
        enough = config.prefill_wait_tokens or math.inf
        if not prompts or self._waited >= config.prefill_wait_steps or sum(prompts) + decoding >= enough:
            self._waited = 0
            return False
        self._waited += 1
        return True

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

    def admit(self, sequence: Sequence, *, is_loading: bool = False) -> None:
        """Move the candidate from waiting to running. One that `is_loading` computes once it is `loaded`."""
        if sequence is not self.candidate():
            raise RuntimeError(f"request {sequence.request.request_id!r} is not the candidate")
        self.waiting.remove(sequence)
        self.start(sequence, is_loading=is_loading)

    def start(self, sequence: Sequence, *, is_loading: bool = False) -> None:
        """Add a sequence that has memory to the running ones."""
        sequence.status = SequenceStatus.RUNNING
        self._admissions += 1
        sequence.admission = self._admissions
        self.running.append(sequence)
        if is_loading and sequence.slot is not None:
            sequence.status = SequenceStatus.LOADING
            self._loading[sequence.slot] = sequence
        else:
            self._prefilling.append(sequence)

    def loaded(self, slots: Iterable[int]) -> list[Sequence]:
        """What the sequences of these slots waited for is there: those that have not ended are in prefill now."""
        sequences = [self._loading.pop(slot) for slot in slots if slot in self._loading]
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING
        self._prefilling += sequences
        return sequences

    def start_decoding(self, sequence: Sequence) -> None:
        """A running sequence has computed its prompt, and got a token."""
        sequence.is_decoding = True
        self._prefilling.remove(sequence)
        self._decoders.join(sequence)

    def victim(self) -> Sequence:
        """The running sequence that gives up its blocks when memory runs out."""
        victim = self._victim(list(self.running))
        check_victim(victim, self.config)
        return victim

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence, which has its slot still, to the queue: all its tokens are computed again."""
        self._stop(sequence)
        self.refused = None
        if sequence.is_decoding:
            self._decoders.leave(sequence)
        elif sequence.status is SequenceStatus.LOADING and sequence.slot is not None:
            del self._loading[sequence.slot]
        else:
            self._prefilling.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.rewind(0)
        self._requeue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended: a running one stays until it is retired, a waiting one leaves the queue."""
        if sequence.status is SequenceStatus.LOADING and sequence.slot is not None:
            del self._loading[sequence.slot]
        sequence.status = SequenceStatus.FINISHED
        self.refused = None
        self.ended.append(sequence)
        self.speculation.forget(sequence)
        if sequence.is_decoding and sequence.slot is not None:
            self._decoders.leave(sequence, once_more=self._decodes_on(sequence))
        self.waiting.remove(sequence)

    def resync(self) -> None:
        """After a failed pass, which may have taken sequences back to prefill: look at each running one again."""
        running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        self._prefilling = [sequence for sequence in running if not sequence.is_decoding]
        self._decoders = Decoders(sequence for sequence in running if sequence.is_decoding)
        self.refused = None

    def _requeue(self, sequence: Sequence) -> None:
        self.waiting.put_first([sequence])

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of `running`, touching few of the others: there may be thousands."""
        del self.running[bisect_left(self.running, sequence.admission, key=attrgetter("admission"))]

    def _decodes_on(self, sequence: Sequence) -> bool:
        """Whether one that ends decodes once more: its end was not known when the coming step was decided."""
        if not self.config.ahead or sequence.finish_reason is not FinishReason.STOP or sequence.spec.needs_history:
            return False
        return len(sequence.token_ids) < sequence.max_total_tokens and self.config.speculation.method is None

    def drops_newest(self, sequence: Sequence) -> bool:
        """Whether a running sequence loses its newest token if it is preempted."""
        return False

    def awaits_memory(self) -> bool:
        """Whether those that decode wait for a step, as memory comes back then, before any is preempted."""
        return False

    def may_admit(self, now: float) -> bool:
        """Whether a waiting sequence may be admitted now. There is at least one."""
        return True

    def ran_short(self) -> None:
        """There was no memory for the candidate."""

    def decoded(self, steps: int) -> None:
        """Sequences have decoded in so many steps, for all of which there was memory."""

    def next_wakeup(self) -> float | None:
        """When, with nothing running, to ask `may_admit` again; None: when something arrives."""
        return None
