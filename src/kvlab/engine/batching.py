"""The batch of a step: plan, reserve, preempt, admit."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum

from kvlab.core import Sequence, SequenceStatus
from kvlab.engine.admission import Admission, admission_of
from kvlab.engine.preemption import Preemption
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.orders import Stage
from kvlab.engine.scheduler.state_chunks import StateScheduler
from kvlab.engine.step_plan import Chunk, DecodeBatch, StepPlan, slots_of
from kvlab.errors import OutOfBlocksError
from kvlab.kv.journal import BlockJournal
from kvlab.kv.protocol import KVCachePool

Fail = Callable[[Sequence, str], None]


class Stop(StrEnum):
    """Why a step admitted no more sequences, though at least one waits."""

    TOKENS = "tokens"  # max_batched_tokens are planned
    SEQUENCES = "sequences"  # max_batch_size sequences run
    BLOCKS = "blocks"  # too few are free, or the step has just taken some from a sequence
    POLICY = "policy"  # it admits none now
    LATE = "late"  # all that wait came when the step was decided already


@dataclass(slots=True)
class StepBatch:
    """What takes part in a step, reserved in the pool: sequences that decode, chunks of those in prefill, and the
    first chunks of those just admitted; and how many tokens its passes computed (see StepRecord).
    """

    decoding: DecodeBatch = field(default_factory=DecodeBatch)
    prefill: list[Chunk] = field(default_factory=list)
    admitted: list[Chunk] = field(default_factory=list)
    stop: Stop | None = None  # of admission; None: nobody waits
    preempted: int = 0
    has_retired: bool = False  # a sequence that had ended gave up its blocks for the step
    decode_last: bool = False
    proposals: dict[int, list[int]] = field(default_factory=dict)  # by slot, of those that decode
    proposed: int = 0
    accepted: int = 0
    recomputed: int = 0
    sampled: int = 0
    vain: int = 0
    context: int = 0
    attended: int = 0

    def plans(self, *, mixed: bool) -> list[StepPlan]:
        """The step's forward passes: one, or unless `mixed` one for those that decode and one for the others."""
        chunks = self.prefill + self.admitted
        if mixed or not (self.decoding and chunks):
            plan = StepPlan(self.decoding, chunks, self.decode_last, self.proposals)
            return [plan] if self.decoding or chunks else []
        passes = [self.part(Stage.DECODE), StepPlan(DecodeBatch(), chunks)]
        return passes[::-1] if self.decode_last else passes

    def part(self, stage: Stage) -> StepPlan:
        """What takes part in a stage of running sequences."""
        if stage is Stage.DECODE:
            return StepPlan(self.decoding, proposals=self.proposals)
        return StepPlan(DecodeBatch(), self.prefill)

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out of the batch, which have their slots still."""
        gone, slots = set(sequences), slots_of(sequences)
        self.decoding.remove(slots)
        self.proposals = {slot: proposed for slot, proposed in self.proposals.items() if slot not in slots}
        self.prefill = [chunk for chunk in self.prefill if chunk.sequence not in gone]
        self.admitted = [chunk for chunk in self.admitted if chunk.sequence not in gone]

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return len(self.decoding) + len(self.prefill) + len(self.admitted)

    @property
    def num_proposed(self) -> int:
        """Tokens that are proposed."""
        return sum(map(len, self.proposals.values()))

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of sequences that are computed again."""
        return sum(count for _, count in self.prefill) + sum(count for _, count in self.admitted)


class BatchBuilder:
    """Puts a step's batch together. `fail` ends a sequence for which there is no memory, `retire` takes the memory
    of one that has ended; while slots are `lent`, a sequence waits for them. `is_read`: whether anybody gets tokens
    as they come.
    """

    def __init__(
        self,
        pool: KVCachePool,
        scheduler: Scheduler,
        fail: Fail,
        journal: BlockJournal | None = None,
        lent: Collection[int] = (),
        retire: Callable[[Sequence], None] = lambda sequence: None,
        is_read: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pool, self._lent = pool, lent
        self._scheduler = scheduler
        self._fail, self._retire, self._is_read = fail, retire, is_read
        self._journal = journal
        if isinstance(scheduler, StateScheduler):
            scheduler.common_tokens = lambda sequence: pool.common_tokens(sequence.token_ids, sequence.request.salt)
        self.preemption = Preemption(scheduler.config.preemption.mode, pool)
        self._is_cut = False  # admission ended before a prompt of which the rest of the step takes nothing

    def build(self, now: float) -> StepBatch:
        """Plan and reserve stage by stage, within `max_batched_tokens`."""
        scheduler, stages = self._scheduler, self._scheduler.order.stages
        scheduler.begin_step(now, self._cached_tokens)
        batch = StepBatch(decode_last=stages[0] is not Stage.DECODE)
        budget = scheduler.config.max_batched_tokens
        for stage in stages:
            if stage is Stage.DECODE:
                if not scheduler.order.decodes_beside_prefill and (batch.prefill or batch.admitted):
                    budget = 0
                batch.decoding = scheduler.plan_decode(budget)
                batch.proposals = scheduler.propose(batch.decoding, budget - len(batch.decoding))
                self._reserve(batch, stage, now)
                if batch.decoding and not batch.preempted:
                    scheduler.decoded(1)
                budget -= len(batch.decoding) + batch.num_proposed
            elif stage is Stage.PREFILL:
                batch.prefill = scheduler.plan_prefill(budget)
                self._reserve(batch, stage, now)
                budget -= sum(count for _, count in batch.prefill)
            elif batch.preempted or batch.has_retired:  # an admission would take the blocks that were just given up
                batch.stop = Stop.BLOCKS
            else:
                decode_is_reserved = Stage.DECODE in stages[: stages.index(stage)]
                reserved_later = 0 if decode_is_reserved else scheduler.num_decoding()
                batch.admitted, refused, budget = self._admit(budget, reserved_later, now)
                if refused is not None:
                    scheduler.ran_short()
                batch.stop = Stop.BLOCKS if refused is not None else self._stop(budget)
                if decode_is_reserved and not batch.prefill and not batch.admitted:
                    scheduler.refused = refused
        return batch

    def receive(self, now: float) -> None:
        """Sequences whose content has come from a tier are in prefill behind it."""
        for sequence in self._scheduler.loaded(self._pool.receive(now)):
            sequence.num_prefilled = self._pool.get_seq_len(*slots_of([sequence]))
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.num_prefilled

    def fork(self, first: Sequence) -> None:
        """The prompt is computed: start the request's other samples from it. Those that find no room wait at the
        front of the queue.
        """
        waiting = []
        fit = admission_of(self._pool, self._scheduler).samples_that_fit(first)
        for number, sequence in enumerate(first.siblings):
            try:
                if number < fit and self._scheduler.has_room():
                    sequence.slot = self._pool.fork_slot(slots_of([first])[0], sequence.token_ids, rerun_last=True)
            except OutOfBlocksError:
                pass
            if sequence.slot is None:
                waiting.append(sequence)
                continue
            sequence.num_prefilled = self._pool.get_seq_len(sequence.slot)
            sequence.high_water = sequence.num_prefilled
            sequence.scheduled_s = first.scheduled_s
            sequence.prompt_logprobs = first.prompt_logprobs
            if self._journal is not None:
                self._journal.assign(sequence.slot, sequence.key)
            self._scheduler.start(sequence)
        self._scheduler.waiting.put_first(waiting)

    def _cached_tokens(self, sequence: Sequence) -> int:
        return self._pool.prefix_tokens(sequence.token_ids, sequence.request.salt)

    def _reserve(self, batch: StepBatch, stage: Stage, now: float) -> None:
        """Make room for a part of the batch: give up what is proposed, then preempt until it fits, or fail the
        sequences that do not.
        """
        while len(part := batch.part(stage)):
            try:
                self._pool.reserve(part.slots, part.num_tokens, part.num_proposed if part.proposals else None)
            except OutOfBlocksError as error:
                if part.proposals:
                    batch.proposals = {}
                elif stage is Stage.DECODE and self._scheduler.awaits_memory():
                    batch.decoding = DecodeBatch()
                elif not (self._scheduler.config.on_exhaustion == "fail" or self._is_alone()):
                    self._preempt(batch, now)
                elif self._scheduler.leaving:
                    self._retire_early(batch, self._scheduler.leaving[-1])
                else:
                    self._fail_refused(batch, part.sequences, error)
            else:
                return

    def _is_alone(self) -> bool:
        """Whether no memory comes back: one sequence runs, and nobody else reads blocks."""
        return len(self._scheduler.running) == 1 and not self._lent

    def _fail_refused(self, batch: StepBatch, sequences: list[Sequence], error: OutOfBlocksError) -> None:
        refused = [sequence for sequence in sequences if sequence.slot in error.slots]
        batch.remove(refused)
        names = ", ".join(repr(sequence.request.request_id) for sequence in refused)
        for sequence in refused:
            self._fail(sequence, f"{error}; did not fit: {names}")

    def _preempt(self, batch: StepBatch, now: float) -> None:
        victim = self._scheduler.victim()
        if victim.status is SequenceStatus.FINISHED:
            self._retire_early(batch, victim)
            return
        batch.remove([victim])
        batch.preempted += 1
        if self._scheduler.drops_newest(victim) and not self._is_read():
            victim.drop_newest()
            batch.vain += 1
        self._scheduler.preempt(victim)
        self.preemption.take_slot(victim, now)

    def _retire_early(self, batch: StepBatch, ended: Sequence) -> None:
        batch.remove([ended])
        self._scheduler.retire_early(ended)
        self._retire(ended)
        batch.has_retired = True

    def _stop(self, budget: int) -> Stop | None:
        """Why admission has ended that found memory for all it tried."""
        if not len(self._scheduler.waiting):
            return None
        if not self._scheduler.has_room():
            return Stop.SEQUENCES
        if self._scheduler.lacks_memory:
            return Stop.BLOCKS
        if budget <= 0 or self._is_cut:
            return Stop.TOKENS
        return Stop.LATE if all(map(self._scheduler.is_late, self._scheduler.waiting)) else Stop.POLICY

    def _admit(self, budget: int, reserved_later: int, now: float) -> tuple[list[Chunk], Sequence | None, int]:
        """Admit sequences while there are tokens in the step's budget and memory for all they have to compute.
        Returns their chunks, the next, if there was no memory for it, and what is left of the budget.
        """
        self._is_cut = False
        admitted, refused, budget = self._open_slots(budget, reserved_later, now)
        if admitted and not self._scheduler.shares_within_step:
            self._pool.reserve(slots_of(sequence for sequence, _ in admitted), [count for _, count in admitted])
        return admitted, refused, budget

    def _open_slots(self, budget: int, reserved_later: int, now: float) -> tuple[list[Chunk], Sequence | None, int]:
        """See `_admit`. Each is reserved at once where the next may share the blocks that it fills in this step."""
        admitted: list[Chunk] = []
        admission: Admission | None = None
        while budget > 0 and (sequence := self._scheduler.candidate()) is not None:
            self._is_cut = not self._scheduler.fits_step(sequence, budget)
            if self._is_cut:
                break
            admission = admission or admission_of(self._pool, self._scheduler, reserved_later=reserved_later)
            longest = self._scheduler.first_chunk(sequence, budget)
            try:
                sequence.slot = self._pool.allocate_slot(
                    token_ids=sequence.token_ids,
                    salt=sequence.request.salt,
                    first_tokens=None if self._scheduler.takes_whole_prompt else longest,
                    all_fit=self._scheduler.config.reserves_prompt,
                    most_tokens=admission.most_tokens(sequence),
                    keep_free=admission.keep_free(sequence),
                    resumed=sequence.preemptions > 0,
                    swapped=sequence.swapped,
                    reuse=not sequence.spec.scores_prompt,
                )
            except OutOfBlocksError:
                return admitted, sequence, budget
            sequence.swapped = None
            if sequence.request.pin_tokens:
                self._pool.pin_prefix(sequence.slot, sequence.request.pin_tokens)
            is_loading = self._pool.is_loading(sequence.slot)
            self._scheduler.admit(sequence, is_loading=is_loading)
            admission.admitted(sequence)
            sequence.num_prefilled = self._pool.get_seq_len(sequence.slot)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                sequence.cached_tokens = sequence.num_prefilled
            else:
                sequence.resumed_s.append(now)
            if self._journal is not None:
                self._journal.assign(sequence.slot, sequence.key)
            if is_loading:
                continue
            chunk = self._scheduler.chunk(sequence, budget)
            if not chunk.num_tokens:  # what was cached of it went to those before it
                continue
            if self._scheduler.shares_within_step:
                self._pool.reserve([sequence.slot], [chunk.num_tokens])
            budget -= self._scheduler.charged(chunk)
            admitted.append(chunk)
        return admitted, None, budget
