"""The scheduler: which sequences run in a step, and which are preempted."""

from dataclasses import dataclass, field

from kvlab.config.values import MOST_SECONDS, all_at_least, at_least, one_of
from kvlab.errors import ConfigError
from kvlab.registry import registry

EXHAUSTION = ("preempt", "fail")
PREEMPTION_MODES = ("recompute", "swap", "auto")
MOST_SPECULATED = 1000  # tokens


@dataclass
class PreemptionConfig:
    """Which sequence is preempted when blocks run out, and what becomes of its blocks."""

    victim: str | None = None  # which running sequence is preempted; null: last_admitted, or priority by that order
    mode: str = "recompute"  # compute its tokens again; swap: copy its blocks to kv.offload; auto: the cheaper

    def __post_init__(self) -> None:
        one_of("scheduler.preemption.mode", self.mode, PREEMPTION_MODES)
        if self.victim is not None:
            registry("scheduler.preemption.victim").check(self.victim)


@dataclass
class SpeculationConfig:
    """Tokens that are proposed for a sequence that decodes, and checked by the model in one step."""

    method: str | None = None  # how tokens are proposed; ngram: what followed such tokens before; null: none are
    num_speculative_tokens: int = 5  # most tokens proposed for a sequence in a step
    prompt_lookup_min: int = 2  # method=ngram: newest tokens that have to have occurred before, at least
    prompt_lookup_max: int = 4  # and how many are looked for; the longest match counts

    def __post_init__(self) -> None:
        if self.method is not None:
            registry("scheduler.speculation.method").check(self.method)
        names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        all_at_least("scheduler.speculation", self, names, 1, MOST_SPECULATED)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            text = f"is less than scheduler.speculation.prompt_lookup_min={self.prompt_lookup_min}"
            raise ConfigError("scheduler.speculation.prompt_lookup_max", self.prompt_lookup_max, text)

    @property
    def most_tokens(self) -> int:
        """Most tokens proposed for a sequence in a step; 0 without a method."""
        return 0 if self.method is None else self.num_speculative_tokens


@dataclass
class SchedulerConfig:
    """Which sequences run in a step. None stands for what the policy does by default: `continuous` admits sequences
    as they come and preempts when blocks run out; `static` reserves all the memory that a sequence may need, so
    that they never do.
    """

    policy: str = "continuous"  # continuous: sequences enter in any step; static: whole batches, one after another
    order: str = "fcfs"  # which sequences are served first
    max_batch_size: int = 48  # sequences that run at once
    max_batched_tokens: int = 512  # token budget of a step, prefill and decode together
    long_prefill_threshold: int | None = None  # most tokens of one prompt in a step; null: all that are left
    chunk_unit: int | None = None  # as TensorRT-LLM: chunks are multiples; more than a step: none are; null: any
    mixed: bool = True  # false: prefill and decode of a step as two forward passes
    ahead: bool = False  # a step is decided as the one before begins: what arrives or ends later is not known
    prefill_wait_steps: int = 0  # most steps that prompts wait, while others decode, for more prompts
    prefill_wait_tokens: int | None = None  # tokens of a step for which they wait no longer; null: only by steps
    max_decode_seqs: int = 16  # order=decode_round_robin: sequences that decode in one step
    aging_s: float | None = 60.0  # seconds of waiting worth one priority level or 1,000 tokens; null: no aging
    default_deadline_s: float = 60.0  # order=deadline: seconds that a request without a deadline has
    max_wait_ms: float = 100.0  # policy=static: milliseconds that a batch that is not full waits for more requests
    admission_reserve: float = 0.2  # share of the free tokens that admission leaves free, 0 to 1
    watermark: float = 0.0  # share of the whole pool that admission leaves free, where that is more, 0 to 1
    reserve_prompt: bool = True  # admit only where the whole prompt fits; false: where its first chunk does
    reserve_output: bool | None = None  # admit only where all that run fit with their max_tokens; null: by policy
    conservativeness: float | None = None  # reserve_output as SGLang: this times a falling share; null: all of it
    max_waiting_requests: int | None = None  # requests that may wait; a full queue refuses more; null: no limit
    on_exhaustion: str | None = None  # out of blocks: preempt, or fail what does not fit; null: by policy
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)  # which sequence is preempted
    speculation: SpeculationConfig = field(
        default_factory=SpeculationConfig
    )  # several tokens of a sequence in a step

    def __post_init__(self) -> None:
        registry("scheduler.policy").check(self.policy)
        registry("scheduler.order").check(self.order)
        if self.on_exhaustion is not None:
            one_of("scheduler.on_exhaustion", self.on_exhaustion, EXHAUSTION)
        limits = ("max_batch_size", "max_batched_tokens", "max_decode_seqs", "max_waiting_requests")
        all_at_least("scheduler", self, (*limits, "long_prefill_threshold", "chunk_unit", "prefill_wait_tokens"), 1)
        at_least("scheduler.prefill_wait_steps", self.prefill_wait_steps, 0)
        at_least("scheduler.conservativeness", self.conservativeness, 0.001)
        at_least("scheduler.max_wait_ms", self.max_wait_ms, 0, 1000 * MOST_SECONDS)
        at_least("scheduler.aging_s", self.aging_s, 0.001, MOST_SECONDS)
        at_least("scheduler.default_deadline_s", self.default_deadline_s, 0, MOST_SECONDS)
        for name in ("admission_reserve", "watermark"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"scheduler.{name}", getattr(self, name), "must be in [0, 1)")
        if self.max_batched_tokens < self.max_batch_size:
            text = f"is less than scheduler.max_batch_size={self.max_batch_size}: a step could not decode every"
            raise ConfigError("scheduler.max_batched_tokens", self.max_batched_tokens, f"{text} running sequence")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        longest, victim = self.long_prefill_threshold, self.preemption.victim
        if longest is not None and longest > self.max_batched_tokens:
            text = f"is more than scheduler.max_batched_tokens={self.max_batched_tokens}: it would limit nothing"
            raise ConfigError("scheduler.long_prefill_threshold", longest, text)
        if self.on_exhaustion == "fail" and victim is not None:
            text = "scheduler.on_exhaustion=fail never preempts; leave it null, or set on_exhaustion=preempt"
            raise ConfigError("scheduler.preemption.victim", victim, text)
        if self.on_exhaustion == "fail" and self.preemption.mode != "recompute":
            text = "scheduler.on_exhaustion=fail never preempts; leave it recompute, or set on_exhaustion=preempt"
            raise ConfigError("scheduler.preemption.mode", self.preemption.mode, text)
        if self.conservativeness is not None and not (self.reserves_output and self.policy == "continuous"):
            text = (
                "scales what scheduler.reserve_output=true keeps for sequences that run; set that, or leave it null"
            )
            raise ConfigError("scheduler.conservativeness", self.conservativeness, text)
        if self.chunk_unit is not None and self.conservativeness is not None:
            text = "is TensorRT-LLM's, scheduler.conservativeness SGLang's; leave one of them null"
            raise ConfigError("scheduler.chunk_unit", self.chunk_unit, text)
        if self.chunk_unit is not None and not self.reserves_output and self.chunk_unit > self.prompt_tokens:
            text = (
                f"is more than the {self.prompt_tokens} tokens of a step, which computes no part of a prompt then, "
            )
            text += "and a preempted sequence may have more; set scheduler.reserve_output=true, or a smaller unit"
            raise ConfigError("scheduler.chunk_unit", self.chunk_unit, text)
        if self.policy != "static":
            return
        whole = "each sequence of a static batch gets all its memory at once"
        for key, value, allowed, reason in (
            ("order", self.order, "fcfs", "a static batch is formed first come, first served"),
            ("chunk_unit", self.chunk_unit, None, "a static batch's prompts are cut where a step ends"),
            ("reserve_output", self.reserve_output, True, whole),
            ("on_exhaustion", self.on_exhaustion, None, f"{whole}, so that it does not run out of blocks"),
            ("preemption.victim", victim, None, f"{whole}, so that none is preempted"),
            ("preemption.mode", self.preemption.mode, "recompute", f"{whole}, so that none is preempted"),
        ):
            if value not in (None, allowed):
                text = f"leave it {'null' if allowed is None else allowed}, or take scheduler.policy=continuous"
                raise ConfigError(f"scheduler.{key}", value, f"{reason}; {text}")

    @property
    def step_tokens(self) -> int:
        """Most tokens of a sequence that a step computes."""
        return max(self.prompt_tokens, 1 + self.speculation.most_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt that a step computes."""
        return min(self.long_prefill_threshold or self.max_batched_tokens, self.max_batched_tokens)

    @property
    def reserves_output(self) -> bool:
        """Whether a sequence is admitted only where all the tokens it may produce have room."""
        return self.policy == "static" if self.reserve_output is None else self.reserve_output

    @property
    def reserves_prompt(self) -> bool:
        """Whether a sequence is admitted only where its whole prompt has room."""
        return self.reserve_prompt or self.reserves_output
