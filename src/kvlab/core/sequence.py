"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvlab.core.records import FinishReason, RequestRecord, TokenLogprobs
from kvlab.core.request import Request, SamplingParams
from kvlab.hashed_prompt import HashedPrompt, TokenList


class SequenceStatus(StrEnum):
    """The state of a sequence."""

    WAITING = "waiting"  # in the queue, without a slot
    RUNNING = "running"  # holds a slot of the pool
    LOADING = "loading"  # holds a slot, and waits for content that a tier has
    FINISHED = "finished"  # ended; its slot goes back in the next step


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SequenceSpec:
    """What an executor needs to know of a sequence and never changes: its name, and how its tokens are picked."""

    request_id: str
    index: int  # which of the request's samples
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # those of the request, and the model's unless it ignores them
    expected_tokens: int | None = None  # of its output (Request.expected_tokens); None: max_tokens
    needs_history: bool = field(init=False)  # sampling needs the tokens so far
    is_adjusted: bool = field(init=False)  # logits are changed before the largest is taken
    scores_prompt: bool = field(init=False)  # log-probabilities of the prompt's tokens are asked for
    is_greedy: bool = field(init=False)  # every token is that of the largest logit, and nothing else is asked for

    def __post_init__(self) -> None:
        asked = self.sampling
        penalties = asked.presence_penalty or asked.frequency_penalty
        needs_history = asked.repetition_penalty != 1 or bool(penalties or asked.bad_words or asked.grammar)
        is_adjusted = needs_history or bool(asked.logit_bias or asked.allowed_token_ids)
        is_greedy = asked.temperature == 0 and not is_adjusted and not asked.min_tokens and asked.logprobs is None
        object.__setattr__(self, "needs_history", needs_history)
        object.__setattr__(self, "is_adjusted", is_adjusted)
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "scores_prompt", asked.prompt_logprobs is not None)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine.

        token_ids:  [ prompt ............ | output ...... ]
                     num_computed ^  K and V of the tokens before it are in the cache

    A request for n samples has n sequences; the first computes the prompt, the others (`siblings`, told apart by
    `index`) are forked from it. A running sequence decodes or is in prefill, which after a preemption covers its
    earlier output too.
    """

    request: Request
    token_ids: TokenList = field(init=False)  # made when it is first read: not while the sequence waits
    index: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()  # those of the request, and the model's unless it ignores them
    num_prefilled: int = 0  # tokens whose K and V are in the cache, while it does not decode
    slot: int | None = None
    swapped: int | None = None  # the pool's ticket for what it computed, while it waits after a preemption
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    admission: int = 0  # counts the scheduler's admissions: of running sequences the last admitted has the highest
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens served from the cache when it was first admitted
    recomputed_tokens: int = 0  # tokens computed again because of a preemption
    is_decoding: bool = False  # its prompt is computed, and of its tokens all but the newest
    high_water: int = 0  # the most tokens that were computed at once, up to its last prefill
    scheduled_s: float | None = None  # first admitted
    preempted_s: list[float] = field(default_factory=list)  # when it gave up its memory
    resumed_s: list[float] = field(default_factory=list)  # when it was admitted again, after each of those
    token_times_s: list[float] = field(default_factory=list)  # when each output token was there
    text: str = ""  # of the output, as far as it was emitted
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token, where asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt but its first token
    finished_s: float | None = None
    spec: SequenceSpec = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)  # prompt and the longest output that was asked for
    ends_at: int = field(init=False)  # tokens with which its output is complete: those, or fewer where it is known

    def __post_init__(self) -> None:
        request = self.request
        self.spec = SequenceSpec(
            request.request_id, self.index, request.sampling, self.stop_token_ids, request.expected_tokens
        )
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.max_total_tokens = self.request.max_total_tokens
        self.ends_at = self.num_prompt_tokens + self.request.expected_tokens

    def __getattr__(self, name: str) -> Any:
        """What is not set yet."""
        if name != "token_ids":
            raise AttributeError(name)
        prompt = self.request.prompt_token_ids
        self.token_ids = prompt.to_array() if isinstance(prompt, HashedPrompt) else list(prompt)
        return self.token_ids

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others: the request's id and which of its samples it is."""
        return self.request.request_id, self.index

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens produced so far."""
        return list(self.token_ids[self.num_prompt_tokens :])

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were produced so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are in the cache; of a sequence that decodes all but the newest."""
        return len(self.token_ids) - 1 if self.is_decoding else self.num_prefilled

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose K and V are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    def rewind(self, num_computed: int) -> None:
        """K and V of all but the first `num_computed` tokens are lost and have to be computed again."""
        if self.is_decoding:
            self.high_water = max(self.high_water, self.num_computed)
            self.is_decoding = False
        self.num_prefilled = num_computed

    def drop_newest(self) -> None:
        """Its newest output token, whose K and V are not in the cache, is to be sampled again."""
        self.high_water = max(self.high_water, self.num_computed)
        del self.token_ids[-1], self.token_times_s[-1], self.logprobs[-1:]

    def advance(self, count: int) -> int:
        """K and V of the next `count` tokens of a sequence in prefill are computed; returns how many of them were
        before.
        """
        before, after = self.num_computed, self.num_computed + count
        again = min(max(self.high_water - before, 0), count)
        self.num_prefilled = after
        self.high_water = max(self.high_water, after)
        self.recomputed_tokens += again
        return again

    def record(self) -> RequestRecord:
        """What happened to it. Only of a sequence that has ended."""
        if self.finish_reason is None or self.finished_s is None:
            raise RuntimeError(f"request {self.request.request_id!r} has not ended")
        return RequestRecord(
            request_id=self.request.request_id,
            sample=self.index,
            arrival_s=self.request.arrival_s,
            prompt_tokens=self.num_prompt_tokens,
            output_token_ids=tuple(self.output_token_ids),
            token_times_s=tuple(self.token_times_s),
            finish_reason=self.finish_reason,
            finished_s=self.finished_s,
            error=self.error,
            text=self.text,
            prompt=self.request.prompt_text,
            scheduled_s=self.scheduled_s,
            cached_tokens=self.cached_tokens,
            computed_prompt_tokens=min(self.high_water, self.num_prompt_tokens) if self.index == 0 else 0,
            preempted_s=tuple(self.preempted_s),
            resumed_s=tuple(self.resumed_s),
            recomputed_tokens=self.recomputed_tokens,
            salt=None if self.request.salt is None else str(self.request.salt),
        )
