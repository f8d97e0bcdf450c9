"""SGLang's admission: memory for a share of what running sequences may still produce."""

from __future__ import annotations

from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, Sequence
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.ends import End

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

    def estimate(self, produced: int, asked: int, sequences: int) -> None:
        """Memory has run out; so many sequences go on, which have produced so many of the tokens they asked for."""
        self.current = min((produced + _AFTER_PREEMPTION * sequences) / (asked + 1), 1.0)


def most_left(sequence: Sequence, known: int) -> int:
    """Tokens that a sequence may produce behind the `known` ones, as far as admission looks ahead."""
    return min(sequence.request.sampling.max_tokens - known, _MOST_TOKENS)


def _is_fixed(sequence: Sequence) -> bool:
    """Whether a sequence produces all that it asks for; a recorded length is known to nobody."""
    return sequence.request.sampling.ignore_eos and sequence.request.output_tokens is None


class RatioScheduler(Scheduler):
    """Continuous batching with `scheduler.conservativeness`. Where there was no memory for a sequence, none is
    admitted until another has left; a preempted one goes to the end of the queue. Prompts that are computed in one
    step do not share what they have in common.
    """

    shares_within_step = False

    def __init__(self, config: SchedulerConfig, *, shares_prefixes: bool = True) -> None:
        super().__init__(config)
        self.ratio = NewTokenRatio(config.conservativeness or 1.0)
        self._shares_prefixes = shares_prefixes

    def add(self, sequence: Sequence) -> None:
        if not self.has_work():
            self.ratio.reset()
        super().add(sequence)

    def may_admit(self, now: float) -> bool:
        """Unless there was no memory in an earlier step, and none has come back or is about to."""
        return not self.lacks_memory or bool(self.ended)

    def expected(self, sequence: Sequence) -> float:
        """Tokens that a running sequence is expected to produce behind those that are known."""
        return most_left(sequence, self._known(sequence)) * self._share(sequence)

    def end(self, sequence: Sequence) -> End:
        """When a sequence is expected to end."""
        known = self._known(sequence)
        left = sequence.request.sampling.max_tokens * self._share(sequence) - known
        return End(left, sequence.num_prompt_tokens + known)

    def is_admitted_by_ends(self, candidate: Sequence) -> bool:
        """Whether it fits is decided by when each ends. Elsewhere by what all may produce together."""
        return not self._shares_prefixes and _is_fixed(candidate)

    def _share(self, sequence: Sequence) -> float:
        """What is expected of the tokens that it asks for: all, if it ignores stop tokens."""
        return 1.0 if _is_fixed(sequence) else self.ratio.current

    def _known(self, sequence: Sequence) -> int:
        """Its output tokens, but that of a step which runs still."""
        times = sequence.token_times_s
        return len(times) - (len(times) > 0 and times[-1] > self._known_s)

    def ran_short(self) -> None:
        self.lacks_memory = bool(self.running)

    def decoded(self, steps: int) -> None:
        self.ratio.decay(steps)

    def retire(self, *, at_once: bool = False) -> list[Sequence]:
        ended = super().retire(at_once=at_once)
        self.lacks_memory = self.lacks_memory and not ended
        return ended

    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        self.lacks_memory = False
        going_on = (None, FinishReason.STOP)  # what a stop token ended in the step that runs goes on, as is known
        left = [other for other in self.running if other.is_decoding and other.finish_reason in going_on]
        asked = sum(other.request.sampling.max_tokens for other in left)
        self.ratio.estimate(sum(map(self._known, left)), asked, len(left))

    def drops_newest(self, sequence: Sequence) -> bool:
        """That of a step which runs still: its result comes when the sequence has no memory any more."""
        is_known = self._known(sequence) == sequence.num_output_tokens
        return not is_known and not sequence.siblings  # which begin once, with the first token

    def awaits_memory(self) -> bool:
        """While the step runs in which a sequence gets the last token that it asked for."""
        return any(each.finish_reason is FinishReason.LENGTH for each in self.leaving)

    def _requeue(self, sequence: Sequence) -> None:
        """At the end of the queue, but before what is not known yet of a step that is decided `ahead`."""
        unknown = [other for other in self.waiting if self.is_late(other)]
        for other in unknown:
            self.waiting.remove(other)
        for other in (sequence, *unknown):
            self.waiting.add(other)
