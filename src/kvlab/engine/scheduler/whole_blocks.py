"""TensorRT-LLM's prompts: all their blocks at once, chunks that end with a block, and none twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence, SequenceStatus
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.step_plan import Chunk, DecodeBatch


class WholeBlockScheduler(Scheduler):
    """Continuous batching with `scheduler.chunk_unit` (`PyMicroBatchScheduler` and `_beneficial_to_skip` of a
    pre-release of TensorRT-LLM 1.3). A chunk that does not end its prompt is a multiple of it. A prompt whose first
    block that is not cached is also that of a prompt in prefill, or of one that goes before it in the same step,
    waits for a step, and those behind it may overtake it. What is found of that block (`kv.partial_reuse`) counts
    in its first step as if it were computed.
    """

    shares_within_step = False
    takes_whole_prompt = True

    def __init__(self, config: SchedulerConfig, *, shares_prefixes: bool = True) -> None:
        super().__init__(config)
        self._unit, self._shares_prefixes = config.chunk_unit or 1, shares_prefixes
        self.most_prompt_tokens = config.prompt_tokens if self._unit > config.prompt_tokens else None
        self._next: Sequence | None = None
        self._newest: Sequence | None = None  # that was admitted last, in this step
        self._begun: set[tuple[int, Hashable]] = set()  # the next blocks of prompts in prefill, as in `_prefix`
        self._first: set[tuple[int, Hashable]] = set()  # the first new ones of those that are before the next
        self._known: dict[tuple[Sequence, int], Hashable] = {}

    def begin_step(self, now: float, cached_tokens: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        super().begin_step(now, cached_tokens)
        self._next = self._newest = None
        if self._open and self._shares_prefixes:
            waits = SequenceStatus.WAITING
            self._known = {key: known for key, known in self._known.items() if key[0].status is waits}
            ends = [(each, self._first_new(each)) for each in self._continuing]
            self._begun = {(end, self._prefix(each, end)) for each, end in ends if end}
            self._first = set()

    def chunk(self, sequence: Sequence, budget: int) -> Chunk:
        tokens, part = sequence.num_uncomputed, self._part(sequence)
        whole = self._whole(tokens + part, budget)
        return Chunk(sequence, tokens if whole >= tokens else max(whole - part, 0))

    def repeated(self) -> tuple[DecodeBatch, Chunk | None, Sequence | None] | None:
        self._newest = None
        return super().repeated()

    def charged(self, chunk: Chunk) -> int:
        return chunk.num_tokens + self._part(chunk.sequence)

    def fits_step(self, sequence: Sequence, budget: int) -> bool:
        if len(sequence.token_ids) <= self.longest_chunk(budget):
            return True
        cached = 0 if sequence.spec.scores_prompt else self._state.cached_tokens(sequence)
        return self._whole(max(len(sequence.token_ids) - cached, 1), budget) > 0  # the last is computed in any case

    def candidate(self) -> Sequence | None:
        """The first, of as many as there is room for, that need not wait for a block of another."""
        if self._next is None:
            self._next = self._choose() if self._open and self.has_room() else None
        return self._next

    def start(self, sequence: Sequence, *, is_loading: bool = False) -> None:
        super().start(sequence, is_loading=is_loading)
        self._next, self._newest = None, sequence

    def _choose(self) -> Sequence | None:
        first = self._chosen()
        others = (each for each in self.waiting if each is not first)
        room = self.config.max_batch_size - len(self.running) - 1
        for sequence in () if first is None else (first, *islice(others, room)):
            if self.is_late(sequence):
                break
            if not self._shares_prefixes or not self._waits_for_block(sequence):
                return sequence
        return None

    def _waits_for_block(self, sequence: Sequence) -> bool:
        """Whether another computes the first block that it would; if not, those behind it may wait for it."""
        # What prompts in prefill compute in this step is found already.
        if any((end, self._prefix(sequence, end)) in self._begun for end in {end for end, _ in self._begun}):
            return True
        end = self._first_new(sequence)
        new = end, self._prefix(sequence, end)
        waits = end > 0 and new in self._first
        self._first.add(new)
        return waits

    def _whole(self, tokens: int, budget: int) -> int:
        """How many of so many uncomputed tokens a step with this budget takes."""
        most = self.longest_chunk(budget)
        return tokens if tokens <= most else most // self._unit * self._unit

    def _part(self, sequence: Sequence) -> int:
        """Tokens that one that is just admitted has found of a block, beside whole ones."""
        if sequence is not self._newest:
            return 0
        return max(sequence.num_computed - self._state.cached_tokens(sequence), 0)

    def _first_new(self, sequence: Sequence) -> int:
        """Where the first whole block ends that is not cached; 0: there is none."""
        end = (self._state.cached_tokens(sequence) // self._unit + 1) * self._unit
        return end if end <= len(sequence.token_ids) else 0

    def _prefix(self, sequence: Sequence, end: int) -> Hashable:
        """What tells a sequence's first tokens from others; None: it has fewer."""
        if end > len(sequence.token_ids):
            return None
        key = sequence, end
        if key not in self._known:
            self._known[key] = hash((sequence.request.salt, tuple(sequence.token_ids[:end])))
        return self._known[key]
