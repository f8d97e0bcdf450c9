"""vLLM's chunks of prompts where layers have states: they end where a state is to be found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.step_plan import Chunk


class StateKeeping(NamedTuple):
    """Where states of prompts are kept for others to find."""

    block_size: int  # tokens of a block, at the end of which one is kept
    within_steps: bool = False  # kernels write the last of a prompt in the middle of its last step


class StateScheduler(Scheduler):
    """Continuous batching whose chunks end with a block (`Scheduler._mamba_block_aligned_split` of vLLM 0.33): all
    but the last of a prompt, which begins where its last whole block before the last token ends, unless kernels
    keep a state there `within_steps`. A prompt is cut, too, where one that goes on differently has left it: the
    next that begins alike finds a state there.
    """

    common_tokens: Callable[[Sequence], int] = staticmethod(lambda sequence: 0)

    def __init__(self, config: SchedulerConfig, keeping: StateKeeping) -> None:
        super().__init__(config)
        self._size, self._within_steps = keeping
        self._common = self.common_tokens  # asked once for a sequence in a step
        self._forks: dict[Sequence, int] = {}  # tokens after which others went on differently

    def begin_step(self, now: float, cached_tokens: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        super().begin_step(now, cached_tokens)
        self._common = cache(self.common_tokens)
        self._forks = {sequence: end for sequence, end in self._forks.items() if sequence in self._prefilling}

    def fits_step(self, sequence: Sequence, budget: int) -> bool:
        return self.first_chunk(sequence, budget) > 0

    def first_chunk(self, sequence: Sequence, budget: int) -> int:
        found = 0 if sequence.spec.scores_prompt else self._state.cached_tokens(sequence)
        common = 0 if sequence.spec.scores_prompt else self._common(sequence)
        self._forks.pop(sequence, None)
        if common > found:
            self._forks[sequence] = common
        return self._cut(sequence, found, budget)

    def chunk(self, sequence: Sequence, budget: int) -> Chunk:
        return Chunk(sequence, self._cut(sequence, sequence.num_computed, budget))

    def _cut(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens from number `start` on that a step with this budget left takes of a prompt."""
        size, known = self._size, len(sequence.token_ids)
        end = min(known, start + self.longest_chunk(budget))
        prefill_end = max(sequence.num_prompt_tokens, known - 1)
        if start >= prefill_end:
            return end - start
        last_kept = (known - 1) // size * size
        if self._keeps_within(start, end, prefill_end):
            last_kept = 0
        if end < prefill_end:
            whole = end // size * size
            if whole > start or size <= self.longest_chunk(self.config.max_batched_tokens):
                end = whole
        fork = self._forks.get(sequence, 0)
        stops = [last_kept, start + (fork - start) // size * size if start < fork < end else 0]
        if start % size:
            stops.append((start // size + 1) * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

    def _keeps_within(self, start: int, end: int, prefill_end: int) -> bool:
        """Whether a step from `start` to `end` keeps the last whole block's state though it goes further."""
        kept = (prefill_end - 1) // self._size * self._size
        is_last = self._within_steps and end >= prefill_end and start % self._size == 0
        return is_last and start + self._size <= kept < end
