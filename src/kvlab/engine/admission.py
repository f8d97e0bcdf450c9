"""How much of the pool has to stay free for a sequence to be admitted."""

from __future__ import annotations

from kvlab.core import Sequence
from kvlab.engine.scheduler.base import Scheduler
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
        self._block_size = pool.block_size
        self._reserved_later = reserved_later
        self._free_tokens = pool.free_token_capacity()
        self._total_tokens = pool.stats().token_slots
        self._reserves_output = scheduler.config.reserves_output
        self._growth = sum(map(self._growth_of, scheduler.running)) if self._reserves_output else 0

    def keep_free(self, candidate: Sequence) -> int:
        """Blocks that have to be left once the candidate has memory for its known tokens."""
        kept = self._reserved_later + self._growth
        if self._free_tokens is not None:
            kept += self._blocks(self._scheduler.headroom(self._free_tokens, self._total_tokens))
        if self._reserves_output and self._scheduler.running:  # alone, it fits: that was checked on its arrival
            kept += self._growth_of(candidate)
        return kept

    def admitted(self, sequence: Sequence) -> None:
        """The candidate has its memory."""
        if self._reserves_output:
            self._growth += self._growth_of(sequence)

    def _growth_of(self, sequence: Sequence) -> int:
        """Blocks a sequence may need beyond those of its known tokens, samples to be forked from it included."""
        request = sequence.request
        longest, prompt = request.max_total_tokens, len(request.prompt_token_ids)
        # A step computes the newest token last, so that its block may not be there yet.
        computed = sequence.num_computed
        grows = self._pool.growth(longest, max(computed, prompt), computed)
        if not sequence.num_output_tokens:
            grows += len(sequence.siblings) * self._pool.blocks_for(longest, prompt // self._block_size)
        return grows

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
