"""What becomes of the blocks of a sequence that is preempted."""

from kvlab.core import Sequence
from kvlab.engine.step_plan import slots_of
from kvlab.kv.protocol import KVCachePool

_WEIGHT = 0.2  # of a new measurement


class Preemption:
    """Takes a victim's slot from it. Its tokens are computed again when it returns (`recompute`), or its blocks are
    copied to the pool's tiers and back (`swap`), or whichever is estimated to take less time (`auto`).

    Computing is estimated by the seconds per token of the steps so far that computed prompts, copying by the
    bandwidth of the tiers. Where these have no room, and before a prompt was measured, tokens are computed again.
    """

    def __init__(self, mode: str, pool: KVCachePool) -> None:
        self._mode, self._pool = mode, pool
        self._token_s: float | None = None  # of a step that computes prompts

    def measured(self, tokens: int, seconds: float) -> None:
        """A step that computed prompts took so long, for so many tokens of prompts and of sequences that decode."""
        if self._mode == "auto" and tokens:
            token_s = seconds / tokens
            before = token_s if self._token_s is None else self._token_s
            self._token_s = before + _WEIGHT * (token_s - before)

    def take_slot(self, victim: Sequence, now: float) -> None:
        """The sequence is preempted, and gives up its slot."""
        (slot,) = slots_of([victim])
        if self._mode != "recompute" and not victim.spec.scores_prompt:
            victim.swapped = self._pool.swap_out(slot, self._is_worth if self._mode == "auto" else None)
        self._pool.free_slot(slot)
        victim.slot = None
        victim.preemptions += 1
        victim.preempted_s.append(now)

    def _is_worth(self, copying_s: float, tokens: int) -> bool:
        return self._token_s is not None and copying_s < tokens * self._token_s
