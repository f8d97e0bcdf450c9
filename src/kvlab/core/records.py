"""What happened to a request, and in a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.core.pool import PoolCounters, PoolStats

Whole = TypeVar("Whole", int, "NDArray[np.int64]")
UNKNOWN_TOKEN = -1  # stands for an output token whose id an engine does not tell


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # it produced an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # it produced `max_tokens` tokens
    ABORTED = "aborted"  # its user aborted it
    FAILED = "failed"  # the step it was in failed


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a sampled token's probability by the model itself, before anything in
    SamplingParams changed it, and the most likely tokens with theirs.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave one request: a token, an end, or both.

    `text` is what can be output since the last output: it lags behind the tokens while a character is incomplete,
    or while it may yet turn out to be part of a stop string. `prompt_logprobs`, with a sample's first token, are
    those of the prompt's tokens from the second on, where the request asked for them.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0  # which of the request's samples
    text: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one sample of one request, from its arrival to its end. Times are seconds on the engine's
    clock; latencies are milliseconds from the scheduled arrival, None where the sample did not get that far.

    What an engine cannot tell keeps its default.
    """

    request_id: str
    sample: int
    arrival_s: float
    prompt_tokens: int
    output_token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]  # when each output token was there
    finish_reason: FinishReason
    finished_s: float
    error: str | None = None
    text: str = ""  # of the output
    prompt: str = ""  # what a user wrote; of messages the last
    scheduled_s: float | None = None  # first admitted
    cached_tokens: int = 0  # prompt tokens served from the prefix cache at the first admission
    computed_prompt_tokens: int | None = None  # of the prompt, computed or found in the cache; 0 past sample 0
    preempted_s: tuple[float, ...] = ()  # when it gave up its memory
    resumed_s: tuple[float, ...] = ()  # when it was admitted again, after each of those
    recomputed_tokens: int = 0  # tokens computed again because of a preemption
    salt: str | None = None  # of its tenant
    replica: int = 0  # of a fleet, that served it

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others: the request's id and which of its samples it is."""
        return self.request_id, self.sample

    @property
    def name(self) -> str:
        """The request's id, with the sample's number from the second on."""
        return f"{self.request_id} #{self.sample}" if self.sample else self.request_id

    @property
    def first_token_s(self) -> float | None:
        """When the first token was there."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def completed(self) -> bool:
        """Whether it ended as its request asked."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def preemptions(self) -> int:
        """How often it gave up its memory."""
        return len(self.preempted_s)

    @property
    def queue_ms(self) -> float | None:
        """Time to the first admission."""
        return self._since_arrival(self.scheduled_s)

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return self._since_arrival(self.first_token_s)

    @property
    def e2el_ms(self) -> float | None:
        """Time to the end."""
        return self._since_arrival(self.finished_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1) for n > 1 tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) * 1000 / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between successive tokens."""
        return tuple((after - before) * 1000 for before, after in pairwise(self.token_times_s))

    def _since_arrival(self, when: float | None) -> float | None:
        return None if when is None else (when - self.arrival_s) * 1000


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One row of the step log. Times are seconds on the engine's clock. `pool` is the pool while the step ran,
    `counters` what the step added to the pool's; None for an engine without blocks. A step that only gave memory
    back has `batch_seqs` 0.
    """

    index: int
    start_s: float
    end_s: float
    running: int
    waiting: int
    batch_seqs: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int = 0
    preempted: int = 0
    schedule_ms: float = 0.0
    execute_ms: float = 0.0
    failed_passes: int = 0  # forward passes that raised; those of their sequences that could were run again
    sampled_tokens: int = 0  # rows of logits that were computed
    context_tokens: int = 0  # tokens whose K and V attention reads, of all sequences, the step's own included
    attended_tokens: int = 0  # pairs of a token of the batch and one it attends to, in a layer that attends to all
    proposed_tokens: int = 0  # of the tokens that decode, those that were proposed and checked
    accepted_tokens: int = 0  # of those, what the model picked itself
    vain_tokens: int = 0  # sampled for those that had ended, as the step was decided before, or taken back
    replica: int = 0  # of a fleet, that took it
    pool: PoolStats | None = None
    counters: PoolCounters | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that sequences got: one for each row of logits, but of those that had ended, and of proposals that
        were not accepted; less those that preempted sequences lost.
        """
        return self.sampled_tokens - self.vain_tokens - self.proposed_tokens + self.accepted_tokens


def attended_pairs(new_tokens: Whole, length: Whole) -> Whole:
    """Pairs of a token and one it attends to, of the last `new_tokens` of `length` tokens: each attends to itself
    and to all before it. Numbers, or arrays with one for each sequence.
    """
    return new_tokens * (2 * length - new_tokens + 1) // 2
