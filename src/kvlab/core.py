"""The nouns that every layer shares: requests, sequences, and what happens to them in one step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter, sub
from typing import Any, NamedTuple

from kvlab.hashed_prompt import HashedPrompt, TokenIds, TokenList

# The most that one request may ask for: none takes the memory or the time of the others.
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16  # stop strings
MAX_STOP_CHARS = 1024  # of each
MAX_STOP_TOKENS = 300
MAX_BIASES = 300  # tokens whose logits are changed
MAX_BIAS = 100.0  # of a logit, up or down
MAX_PENALTY = 2.0  # for a token's presence or frequency, up or down
UNKNOWN_TOKEN = -1  # stands for an output token whose id an engine does not tell
MAX_WHOLE = 2**31 - 1  # of whole numbers that nothing else bounds
MAX_TEMPERATURE = 1e9  # and repetition penalty: float32 still divides by it


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # it produced an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # it produced `max_tokens` tokens
    ABORTED = "aborted"  # its user aborted it
    FAILED = "failed"  # the step it was in failed


class SequenceStatus(StrEnum):
    """The state of a sequence."""

    WAITING = "waiting"  # in the queue, without a slot
    RUNNING = "running"  # holds a slot of the pool
    FINISHED = "finished"  # ended; its slot goes back in the next step


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked, and when to stop.

    `temperature` 0 is greedy. With `seed`, a sampled request's tokens depend on nothing but the request. `n`
    samples are drawn of one prompt, which is computed once. The order is bias, repetition penalty, penalties for
    presence and frequency, stop tokens masked below `min_tokens`, temperature, `top_k`, `top_p`, `min_p`. The
    output's text, where the engine has a detokenizer, ends before the first of the `stop` strings.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together have this probability (Holtzman et al., 2020)
    min_p: float = 0.0  # only tokens at least this often as likely as the most likely (Nguyen et al., 2024)
    repetition_penalty: float = 1.0  # of tokens in prompt or output; above 1 discourages (Keskar et al., 2019)
    presence_penalty: float = 0.0  # taken once from the logit of each token in the output
    frequency_penalty: float = 0.0  # taken from it as often as the token is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens and what is added to their logits
    logprobs: int | None = None  # how many alternatives to report with each token's log-probability
    min_tokens: int = 0  # before that many, stop tokens are not sampled and stop strings do not stop
    stop: tuple[str, ...] = ()


class Message(NamedTuple):
    """A part of a conversation. Roles are what the checkpoint's chat template knows: system, user, assistant."""

    role: str
    content: str


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a sampled token's probability by the model itself, before anything in
    SamplingParams changed it, and the most likely tokens with theirs.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for. `arrival_s` is in seconds on the engine's clock. Prompts share memory only under the
    same `salt`. The first `pin_tokens` of the prompt are to stay cached, as far as the pool pins any. Under
    scheduler.order=priority the lowest `priority` goes first, under deadline the request that has to be complete
    first: `deadline_s` seconds after its arrival (None: scheduler.default_deadline_s).

    A request that `follows` another is the next turn of a conversation: `prompt_token_ids` come behind the
    other's prompt and output, and `arrival_s` counts from the other's end. Who drives the engine puts it together.

    `prompt` is what a user wrote, if one did: who makes requests turns it into tokens, and engines do not read it.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    arrival_s: float = 0.0
    salt: str | int | None = None
    follows: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    prompt: str | tuple[Message, ...] | None = None
    pin_tokens: int = 0

    @property
    def prompt_text(self) -> str:
        """What a user wrote; of messages the last."""
        prompt = self.prompt or ""
        return prompt if isinstance(prompt, str) else prompt[-1].content

    @property
    def max_total_tokens(self) -> int:
        """The most tokens the request can grow to, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What an executor needs to know of a sequence and never changes: its name, and how its tokens are picked."""

    request_id: str
    index: int  # which of the request's samples
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # those of the request, and the model's unless it ignores them
    is_penalized: bool = field(init=False)  # sampling needs the tokens so far
    is_adjusted: bool = field(init=False)  # logits are changed before the largest is taken
    is_greedy: bool = field(init=False)  # every token is that of the largest logit, and nothing else is asked for

    def __post_init__(self) -> None:
        asked = self.sampling
        is_penalized = asked.repetition_penalty != 1 or bool(asked.presence_penalty or asked.frequency_penalty)
        is_adjusted = is_penalized or bool(asked.logit_bias)
        is_greedy = asked.temperature == 0 and not is_adjusted and not asked.min_tokens and asked.logprobs is None
        object.__setattr__(self, "is_penalized", is_penalized)
        object.__setattr__(self, "is_adjusted", is_adjusted)
        object.__setattr__(self, "is_greedy", is_greedy)


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
    finished_s: float | None = None
    spec: SequenceSpec = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)  # prompt and the longest output

    def __post_init__(self) -> None:
        request = self.request
        self.spec = SequenceSpec(request.request_id, self.index, request.sampling, self.stop_token_ids)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.max_total_tokens = self.request.max_total_tokens

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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave one request: a token, an end, or both.

    `text` is what can be output since the last output: it lags behind the tokens while a character is incomplete,
    or while it may yet turn out to be part of a stop string.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0  # which of the request's samples
    text: str = ""
    logprobs: TokenLogprobs | None = None


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
class PoolStats:
    """A pool of blocks at one moment. Ratios are 0 where there is nothing to divide by."""

    block_size: int  # token slots of a block
    blocks_total: int
    blocks_in_use: int
    tokens_stored: int  # tokens whose K and V are in blocks in use, each block counted once
    blocks_cached: int = 0  # free, but holding content that can be shared
    shared_blocks: int = 0  # references beyond the first: blocks that sharing saves now
    sequences: int = 0
    kv_bytes: int = 0  # bytes of the whole pool
    blocks_pinned: int = 0  # in use or cached, with content that stays

    @property
    def token_slots(self) -> int:
        """Token slots of the whole pool."""
        return self.blocks_total * self.block_size

    @property
    def block_utilization(self) -> float:
        """Blocks in use over blocks in the pool."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0

    @property
    def token_utilization(self) -> float:
        """Stored tokens over token slots of the pool."""
        return self.tokens_stored / self.token_slots if self.token_slots else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """1 - stored tokens / token slots of the blocks in use."""
        in_use = self.blocks_in_use * self.block_size
        return 1 - self.tokens_stored / in_use if in_use else 0.0


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What a pool did since its start. The difference of two is what it did in between."""

    blocks_allocated: int = 0  # handed out
    blocks_freed: int = 0  # returned
    evictions: int = 0  # times that memory for new tokens was taken from cached content
    evicted_blocks: int = 0
    cow_copies: int = 0  # shared blocks copied before they were written
    merged_blocks: int = 0  # copies given back because an equal block was there
    prompt_tokens: int = 0  # tokens of prompts at their first admission
    hit_tokens: int = 0  # of those, served from blocks computed before
    same_step_hit_tokens: int = 0  # of those hits, in blocks that another sequence computes in the same step
    recompute_hit_tokens: int = 0  # tokens that a preempted sequence found again on its return
    expired_blocks: int = 0  # given up because nobody had used them for kv.ttl_s
    quota_evictions: int = 0  # evicted blocks of tenants that were over kv.quota
    pinned_evictions: int = 0  # evicted blocks that were pinned: nothing else was left
    pins_refused: int = 0  # prefixes that were not pinned, for lack of kv.pinned_share or kv.quota

    def __sub__(self, earlier: PoolCounters) -> PoolCounters:
        """What was added since `earlier`."""
        return PoolCounters(*map(sub, _counts(self), _counts(earlier)))


_counts = attrgetter(*(each.name for each in fields(PoolCounters)))


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
    pool: PoolStats | None = None
    counters: PoolCounters | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that sequences got: one for each row of logits but those of proposals that were not accepted."""
        return self.sampled_tokens - self.proposed_tokens + self.accepted_tokens
