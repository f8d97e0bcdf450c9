"""How much of the pool has to stay free for a sequence to be admitted."""

from kvlab.core import Sequence
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.ends import Ends
from kvlab.engine.scheduler.new_token_ratio import RatioScheduler, most_left
from kvlab.engine.step_plan import slots_of
from kvlab.kv.protocol import KVCachePool


class Admission:
    """The budget of one step's admissions, in blocks.

    Where a token budget has a meaning (paged) that is the reserve or the watermark, whichever is more, unless
    nothing runs. With `reserve_output` it is also all that running sequences and candidate may still grow by.
    """

    def __init__(self, pool: KVCachePool, scheduler: Scheduler, *, reserved_later: int = 0) -> None:
        """`reserved_later`: blocks that the same step gives to other sequences after admission."""
        self._pool = pool
        self._scheduler = scheduler
        self._free_tokens = pool.free_token_capacity()
        self._total_tokens = pool.stats().token_slots
        self._reserves_output = scheduler.config.reserves_output
        self._last = scheduler.config.chunk_unit is not None  # TensorRT-LLM has room for the last token, too
        self._taken_later = self._growth_of(scheduler.running) if self._reserves_output else reserved_later

    def keep_free(self, candidate: Sequence) -> int:
        """Blocks that have to be left once the candidate has memory for its known tokens."""
        kept = self._taken_later
        if self._free_tokens is not None:
            reserve = self._scheduler.headroom(self._free_tokens, self._total_tokens)
            kept += -(-reserve // self._pool.block_size)
        if self._reserves_output and self._scheduler.running:  # alone, it fits: that was checked on its arrival
            kept += self._growth_of_samples(candidate)
        return kept

    def most_tokens(self, candidate: Sequence) -> int | None:
        """For how many of its tokens there have to be blocks; None: for those that are known."""
        if not (self._reserves_output and self._scheduler.running):
            return None
        return max(_most_stored(candidate) + self._last, len(candidate.token_ids))

    def admitted(self, sequence: Sequence) -> None:
        """The candidate has its memory."""
        if self._reserves_output:
            self._taken_later += self._growth_of([sequence])

    def samples_that_fit(self, first: Sequence) -> int:
        """How many of a request's other samples can be forked, now that its prompt is computed."""
        if not self._reserves_output:
            return len(first.siblings)
        each = self._fork_growth(first)
        free = self._pool.free_slot_count() - self._taken_later + self._growth_of_samples(first)
        return max(free // each, 0) if each else len(first.siblings)

    def _growth_of(self, running: list[Sequence]) -> int:
        """Blocks that running sequences may need beyond those they have, samples to be forked of them included."""
        to_compute = [sequence.num_uncomputed for sequence in running]
        growth = self._pool.slot_growth(slots_of(running), self._reserved(running), to_compute)
        return growth + sum(map(self._growth_of_samples, running))

    def _reserved(self, running: list[Sequence]) -> list[int]:
        """Tokens of running sequences that are to have room."""
        return [_most_stored(sequence) + self._last for sequence in running]

    def _growth_of_samples(self, sequence: Sequence) -> int:
        """The same of the samples that are to be forked of a sequence, as many as can run at once."""
        if not sequence.siblings or sequence.num_output_tokens:
            return 0
        return min(len(sequence.siblings), self._scheduler.config.max_batch_size - 1) * self._fork_growth(sequence)

    def _fork_growth(self, sequence: Sequence) -> int:
        return self._pool.fork_growth(_most_stored(sequence) + self._last, sequence.num_prompt_tokens)


class RatioAdmission(Admission):
    """SGLang's (`PrefillAdder`): all that the candidate may produce and a part of what running sequences may, those
    of the same step in full; and a block for each of the step.
    """

    def __init__(self, pool: KVCachePool, scheduler: RatioScheduler, *, reserved_later: int = 0) -> None:
        self._ratio = scheduler
        self._ends: Ends | None = None  # of those that run and have been tried in this step
        super().__init__(pool, scheduler, reserved_later=reserved_later)
        self._in_step = sum(not sequence.is_decoding for sequence in scheduler.running)  # prompts: a block for each
        self._taken_later += self._in_step

    def keep_free(self, candidate: Sequence) -> int:
        kept, by_ends = super().keep_free(candidate), self._ratio.is_admitted_by_ends(candidate)
        until_ends = self._until_ends(candidate) if by_ends else 0
        if not self._ratio.running:
            return kept
        return max(kept + 1, until_ends) if by_ends else kept + 2  # its own block, and one that stays

    def most_tokens(self, candidate: Sequence) -> int | None:
        if not self._ratio.running or self._ratio.is_admitted_by_ends(candidate):
            return None
        return len(candidate.token_ids) + most_left(candidate, candidate.num_output_tokens)

    def admitted(self, sequence: Sequence) -> None:
        super().admitted(sequence)
        self._taken_later += 1
        self._in_step += 1
        if self._pool.free_slot_count() <= self._taken_later and self._is_whole(sequence):
            self._ratio.ran_short()

    def _is_whole(self, sequence: Sequence) -> bool:
        """Whether the step computes all of its prompt."""
        tokens = len(sequence.token_ids)
        return not self._pool.slot_growth(slots_of([sequence]), [tokens], [tokens])

    def _until_ends(self, candidate: Sequence) -> int:
        """Blocks that all take until they end, a block for each of the step, and one token that stays."""
        if self._ends is None:
            self._ends = Ends(map(self._ratio.end, (candidate, *self._ratio.running)))
        else:
            self._ends.add(self._ratio.end(candidate))
        return self._in_step + 1 + int(self._ends.most_tokens()) // self._pool.block_size + 1

    def _reserved(self, running: list[Sequence]) -> list[int]:
        tokens, expected = list[int](), 0.0
        for sequence in running:
            before = int(expected)
            # What a step computes of a prompt counts in full.
            expected += self._ratio.expected(sequence) if sequence.is_decoding else most_left(sequence, 0)
            tokens.append(len(sequence.token_ids) - sequence.is_decoding + int(expected) - before)
        return tokens


def admission_of(pool: KVCachePool, scheduler: Scheduler, *, reserved_later: int = 0) -> Admission:
    """The budget as the scheduler has it."""
    if isinstance(scheduler, RatioScheduler):
        return RatioAdmission(pool, scheduler, reserved_later=reserved_later)
    return Admission(pool, scheduler, reserved_later=reserved_later)


def _most_stored(sequence: Sequence) -> int:
    """Tokens whose K and V it may need: nobody computes the last of its output."""
    return sequence.max_total_tokens - 1
