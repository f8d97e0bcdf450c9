"""What a run is made of: typed settings, checked when they are built. The only schema there is.

The classes are plain dataclasses whose field types OmegaConf understands, so that `src/run.py` can hand
them to Hydra; nothing here imports either.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8")
WEIGHTS = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda")
KV_BACKENDS = ("contiguous", "paged")
EVICTION_POLICIES = ("lru", "fifo", "lfu")
POLICIES = ("static", "continuous")
ORDERS = ("fcfs", "prefill_first", "decode_round_robin", "shortest_first", "priority")
EXHAUSTION = ("preempt", "fail")
VICTIMS = ("last_admitted", "fewest_generated", "priority")
FAULTS = ("forward", "sampler", "sequence", "any")
WORKLOAD_SOURCES = ("synthetic", "jsonl")
ARRIVALS = ("burst", "uniform", "poisson")
DISTRIBUTIONS = ("uniform", "lognormal")
TRACKING_BACKENDS = ("mlflow", "off")

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(text: str, *, key: str) -> int:
    """Read a size such as `512MiB`, `1.5 GiB`, `2GB` or a plain number of bytes.

    Raises ConfigError, naming `key`, for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(key, text, "is not a size; write for example 512MiB, 4GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Write a number of bytes for people: `512.0 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(key, value, f"unknown; known: {', '.join(known)}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not (value >= least and math.isfinite(value)):
        raise ConfigError(key, value, f"must be a number, at least {least}")


@dataclass
class ModelConfig:
    """A decoder: its architecture and where its weights come from."""

    name: str = "???"
    family: str | None = "qwen3"  # transformers' model_type; None: read from `path`
    architecture: dict[str, Any] = field(default_factory=dict)  # values of transformers' configuration class
    path: str | None = None  # a directory or hub id that holds config.json (and weights)
    weights: str | None = "dummy"  # "dummy", a directory, a hub id; None: those of `path`
    max_seq_len: int = 1024  # longest sequence served, prompt and output together, in tokens

    def __post_init__(self) -> None:
        _at_least("model.max_seq_len", self.max_seq_len, 1)
        if self.family is None and self.path is None:
            raise ConfigError("model.path", self.path, "model=checkpoint needs model.path=<directory or hub id>")
        if self.weights is None:
            if self.path is None:
                raise ConfigError("model.weights", None, "needs model.path, or weights of its own")
            self.weights = self.path


@dataclass
class KVConfig:
    """The KV cache: how it is laid out and how large it is.

    Size is `num_blocks` or `memory`; with neither, the bytes of `scheduler.max_batch_size` contiguous slots
    of `model.max_seq_len` tokens. The same setting gives either backend the same bytes.
    """

    backend: str = "paged"
    dtype: str = "auto"  # auto: executor.dtype; int8: with a scale per token and head
    block_size: int = 16  # token slots of a page; for contiguous only the unit of num_blocks
    num_blocks: int | None = None
    memory: str | None = None  # 512MiB, 4GiB, ...
    prefix_sharing: bool = True  # paged: store equal prefixes once and keep them after their sequences
    eviction: str = "lru"  # which cached block is given up first

    def __post_init__(self) -> None:
        _one_of("kv.backend", self.backend, KV_BACKENDS)
        _one_of("kv.dtype", self.dtype, KV_DTYPES)
        _one_of("kv.eviction", self.eviction, EVICTION_POLICIES)
        _at_least("kv.block_size", self.block_size, 1)
        _at_least("kv.num_blocks", self.num_blocks, 1)
        if self.memory is not None and self.num_blocks is not None:
            raise ConfigError(
                "kv.memory", self.memory, f"kv.num_blocks={self.num_blocks} is given too; give one of them"
            )
        if self.memory is not None and parse_bytes(self.memory, key="kv.memory") == 0:
            raise ConfigError("kv.memory", self.memory, "must be more than 0 bytes")


@dataclass
class PreemptionConfig:
    """Who gives up its memory when it runs out. None: the last admitted, where anyone has to."""

    victim: str | None = None

    def __post_init__(self) -> None:
        if self.victim is not None:
            _one_of("scheduler.preemption.victim", self.victim, VICTIMS)


@dataclass
class SchedulerConfig:
    """Who runs in a step. None stands for what the policy does of itself: `continuous` admits as sequences come and
    preempts when memory runs out; `static` gives each its whole memory at once, so that it never does.
    """

    policy: str = "continuous"
    order: str = "fcfs"
    max_batch_size: int = 48  # sequences running at once
    max_batched_tokens: int = 512  # tokens of one step, prefill and decode together
    long_prefill_threshold: int | None = None  # most tokens of one prompt in a step; None: all that are left
    mixed: bool = True  # False: prefill and decode of a step as two forward passes
    max_decode_seqs: int = 16  # order=decode_round_robin: sequences that decode in one step
    max_wait_ms: float = 100.0  # static: how long a batch that is not full waits for more requests
    admission_reserve: float = 0.2  # share of free tokens that admission leaves alone
    watermark: float = 0.0  # share of the whole pool that admission leaves alone, where that is more
    reserve_output: bool | None = None  # admit only where prompt and max_tokens fit, beside those of all that run
    max_waiting_requests: int | None = None  # a full line refuses further requests
    on_exhaustion: str | None = None  # preempt, or fail the sequences that do not fit
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)

    def __post_init__(self) -> None:
        _one_of("scheduler.policy", self.policy, POLICIES)
        _one_of("scheduler.order", self.order, ORDERS)
        if self.on_exhaustion is not None:
            _one_of("scheduler.on_exhaustion", self.on_exhaustion, EXHAUSTION)
        for name in (
            "max_batch_size",
            "max_batched_tokens",
            "long_prefill_threshold",
            "max_decode_seqs",
            "max_waiting_requests",
        ):
            _at_least(f"scheduler.{name}", getattr(self, name), 1)
        _at_least("scheduler.max_wait_ms", self.max_wait_ms, 0)
        for name in ("admission_reserve", "watermark"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"scheduler.{name}", getattr(self, name), "must be in [0, 1)")
        if self.max_batched_tokens < self.max_batch_size:
            raise ConfigError(
                "scheduler.max_batched_tokens",
                self.max_batched_tokens,
                f"is less than scheduler.max_batch_size={self.max_batch_size}: a step could not decode "
                "every running sequence",
            )
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        longest, victim = self.long_prefill_threshold, self.preemption.victim
        if longest is not None and longest > self.max_batched_tokens:
            raise ConfigError(
                "scheduler.long_prefill_threshold",
                longest,
                f"is more than scheduler.max_batched_tokens={self.max_batched_tokens}: it would limit nothing",
            )
        if self.on_exhaustion == "fail" and victim is not None:
            raise ConfigError(
                "scheduler.preemption.victim",
                victim,
                "scheduler.on_exhaustion=fail preempts nobody; leave it null, or set on_exhaustion=preempt",
            )
        if self.policy != "static":
            return
        whole = "a static batch is given its whole memory at once"
        for key, value, allowed, reason in (
            ("order", self.order, "fcfs", "a static batch is formed first come, first served"),
            ("reserve_output", self.reserve_output, True, whole),
            ("on_exhaustion", self.on_exhaustion, None, f"{whole}, so that it does not run out"),
            ("preemption.victim", victim, None, f"{whole}, so that nobody is preempted"),
        ):
            if value not in (None, allowed):
                instead = "null" if allowed is None else allowed
                raise ConfigError(
                    f"scheduler.{key}", value, f"{reason}; leave it {instead}, or take scheduler.policy=continuous"
                )

    @property
    def reserves_output(self) -> bool:
        """Whether a sequence enters only where all it may produce has room."""
        return self.policy == "static" if self.reserve_output is None else self.reserve_output


@dataclass
class AttentionConfig:
    """How attention over the cache is computed: a backend's name, or `auto`."""

    backend: str = "auto"


@dataclass
class ExecutorConfig:
    """Where the model runs."""

    device: str = "auto"  # auto: cuda where there is one, else cpu
    dtype: str = "bfloat16"
    weights: str = "auto"  # auto: dtype; int8: matrices, with a scale per output (CPU, bfloat16)
    threads: int | None = None  # CPU threads; None: one for each core that the process may use
    kernels: bool = True  # false: PyTorch computes everything, and attention=auto takes no kernel either

    def __post_init__(self) -> None:
        _one_of("executor.device", self.device, DEVICES)
        _one_of("executor.dtype", self.dtype, DTYPES)
        _one_of("executor.weights", self.weights, WEIGHTS)
        _at_least("executor.threads", self.threads, 1)


@dataclass
class LengthConfig:
    """A length in tokens between two bounds, both included: uniform, or log-normal with its `median` and the
    `sigma` of its logarithm, cut off at the bounds.
    """

    min: int = 1
    max: int = 1
    distribution: str = "uniform"
    median: float | None = None
    sigma: float = 1.0


@dataclass
class WorkloadConfig:
    """The requests: how many, when, how long; or a file of them."""

    name: str = "???"
    source: str = "synthetic"
    num_requests: int = 16
    arrival: str = "burst"  # burst: all at once; uniform: evenly, `rate` per second; poisson: so on average
    rate: float | None = None
    prompt_len: LengthConfig = field(default_factory=LengthConfig)  # each request's own tokens
    output_len: LengthConfig = field(default_factory=LengthConfig)
    system_len: int = 0  # tokens that begin every prompt
    num_groups: int = 1  # groups of requests that share `group_len` more tokens; popularity is Zipf's
    group_len: int = 0
    zipf: float = 1.0  # group k of num_groups is drawn in proportion to 1 / k ** zipf
    turns: int = 1  # requests of a conversation, each behind what was said before; num_requests conversations
    think_s: float = 0.0  # between an answer and the conversation's next turn
    samples: int = 1  # outputs of each prompt
    priorities: int = 1  # each request's or conversation's priority is one of 0 to priorities - 1
    path: str | None = None  # source=jsonl
    ignore_eos: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _one_of("workload.source", self.source, WORKLOAD_SOURCES)
        _one_of("workload.arrival", self.arrival, ARRIVALS)
        _at_least("workload.temperature", self.temperature, 0)
        if self.source == "jsonl":
            if self.path is None:
                raise ConfigError("workload.path", self.path, "workload=jsonl needs workload.path=<file>")
            return
        _at_least("workload.num_requests", self.num_requests, 1)
        for name, length in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            _at_least(f"workload.{name}.min", length.min, 1)
            if length.max < length.min:
                raise ConfigError(
                    f"workload.{name}.max", length.max, f"is less than workload.{name}.min={length.min}"
                )
            _one_of(f"workload.{name}.distribution", length.distribution, DISTRIBUTIONS)
            _at_least(f"workload.{name}.sigma", length.sigma, 0)
            if length.distribution == "lognormal" and not (length.median and length.median > 0):
                raise ConfigError(f"workload.{name}.median", length.median, "lognormal needs a median, in tokens")
        for name in ("system_len", "group_len", "zipf", "think_s"):
            _at_least(f"workload.{name}", getattr(self, name), 0)
        for name in ("num_groups", "turns", "samples", "priorities"):
            _at_least(f"workload.{name}", getattr(self, name), 1)
        if self.arrival != "burst" and not (self.rate and self.rate > 0):
            raise ConfigError(
                "workload.rate", self.rate, f"workload.arrival={self.arrival} needs requests per second"
            )


@dataclass
class TrackingConfig:
    """Where runs are recorded."""

    backend: str = "mlflow"
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else an SQLite store at the repository root
    experiment: str = "kvlab"
    artifacts: str | None = None  # where a new experiment keeps files; None: by the store, or as its server says
    timeout_s: float = 10.0  # how long a server may take to answer
    system_metrics: bool = False  # sample the machine's load each second: the one thing tracked while requests run

    def __post_init__(self) -> None:
        _one_of("tracking.backend", self.backend, TRACKING_BACKENDS)
        if not self.timeout_s > 0:
            raise ConfigError("tracking.timeout_s", self.timeout_s, "must be more than 0")


@dataclass
class FaultsConfig:
    """Faults put into the executor. `forward` and `sampler` strike a pass with probability `rate`, before its
    tokens are computed or after; `sequence` poisons that share of the requests: each fails every pass it is in once
    it has produced some tokens. `any`: all three. The same seed gives the same faults.
    """

    kind: str = "any"
    rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("debug.faults.kind", self.kind, FAULTS)
        if not 0 <= self.rate <= 1:
            raise ConfigError("debug.faults.rate", self.rate, "must be in [0, 1]")


@dataclass
class DebugConfig:
    """What costs time: `audit` looks for a broken invariant of the pool after every step, `profile` finds out where
    a step's time goes; `faults` are put in to see what becomes of them.
    """

    audit: bool = False
    profile: bool = False
    faults: FaultsConfig = field(default_factory=FaultsConfig)


@dataclass
class RunConfig:
    """One run. `tags` go to the tracking store as they are; `optimize` names the metric that a sweep looks for."""

    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    seed: int = 0
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    optimize: str | None = None
    repeats: int = 1  # runs of each configuration, to see how much its figures vary
    repeat: int = 0  # which of them this is; a sweep sets it
    resume: bool = False  # leave out what the tracking store has finished already
    figures: bool = True  # keep what happens to each block, and draw the run's pictures when it is over

    @property
    def kv_dtype(self) -> str:
        """What K and V are stored in."""
        return self.executor.dtype if self.kv.dtype == "auto" else self.kv.dtype

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        _at_least("repeats", self.repeats, 1)
        _at_least("repeat", self.repeat, 0)
        if self.kv.backend == "paged" and self.scheduler.max_batched_tokens < self.kv.block_size:
            raise ConfigError(
                "scheduler.max_batched_tokens",
                self.scheduler.max_batched_tokens,
                f"is less than kv.block_size={self.kv.block_size}: a step could not fill a block",
            )
