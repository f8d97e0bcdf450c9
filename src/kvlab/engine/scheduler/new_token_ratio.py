"""SGLang's admission: memory for a share of what running sequences may still produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence
from kvlab.engine.scheduler.base import Scheduler

# SGLang 0.5.23: SGLANG_INIT_NEW_TOKEN_RATIO, _MIN_NEW_TOKEN_RATIO_FACTOR, _NEW_TOKEN_RATIO_DECAY_STEPS,
# _RETRACT_DECODE_STEPS and _CLIP_MAX_NEW_TOKENS_ESTIMATION.
_FIRST, _LEAST_SHARE, _DECAY_STEPS, _AFTER_PREEMPTION, _MOST_TOKENS = 0.7, 0.14, 600, 20, 4096


class NewTokenRatio:
    """The share of what running sequences may still produce that admission keeps memory for.

    It falls with each step that decodes, to a least share. When memory has run out it is set by what was produced
    until then (SGLang's `NewTokenRatioTracker`).
    """

    def __init__(self, conservativeness: float) -> None:
        """`conservativeness` scales the first share, as SGLang's `--schedule-conservativeness`."""
        self._first = min(_FIRST * conservativeness, 1.0)
        self._least = self._first * _LEAST_SHARE
        self.current = self._first

    def reset(self) -> None:
        """There was nothing to do."""
        self.current = self._first

    def decay(self, steps: int) -> None:
        """So many steps have decoded, and memory has sufficed."""
        self.current = max(self.current - steps * (self._first - self._least) / _DECAY_STEPS, self._least)

    def estimate(self, left: Iterable[Sequence]) -> None:
        """Memory has run out; these go on."""
        produced = asked = 0
        for sequence in left:
            produced += sequence.num_output_tokens + _AFTER_PREEMPTION
            asked += sequence.request.sampling.max_tokens
        self.current = min(produced / (asked + 1), 1.0)

    def expected(self, sequence: Sequence) -> float:
        """Tokens that a sequence is expected to produce still: all that it asks for, if it ignores stop tokens."""
        request = sequence.request
        is_fixed = request.sampling.ignore_eos and request.output_tokens is None
        return most_left(sequence) * (1.0 if is_fixed else self.current)


def most_left(sequence: Sequence) -> int:
    """Tokens that a sequence may still produce, as far as admission looks ahead."""
    return min(sequence.max_total_tokens - len(sequence.token_ids), _MOST_TOKENS)


class RatioScheduler(Scheduler):
    """Continuous batching with `scheduler.conservativeness`. Where there was no memory for a sequence, none is
    admitted until another has left; a preempted one goes to the end of the queue.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.ratio = NewTokenRatio(config.conservativeness or 1.0)
        self._is_full = False

    def add(self, sequence: Sequence) -> None:
        if not self.has_work():
            self.ratio.reset()
        super().add(sequence)

    def may_admit(self, now: float) -> bool:
        """Unless there was no memory in an earlier step, and none has come back."""
        return not self._is_full

    def begin_step(self, now: float, cached_tokens: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        self._is_full = self._is_full and bool(self.running)
        super().begin_step(now, cached_tokens)

    def ran_short(self) -> None:
        self._is_full = bool(self.running)

    def decoded(self, steps: int) -> None:
        self.ratio.decay(steps)

    def retire(self, *, at_once: bool = False) -> list[Sequence]:
        ended = super().retire(at_once=at_once)
        self._is_full = self._is_full and not ended
        return ended

    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        self._is_full = False
        self.ratio.estimate(other for other in self.running if other.is_decoding and other.finish_reason is None)

    def _requeue(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
