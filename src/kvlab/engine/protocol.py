"""What the laboratory, a server or a comparison asks of an engine, kvlab's own or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlab.core import PoolCounters, PoolStats, Request, RequestRecord, Sequence, StepOutput, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.clock import Clock
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal

if TYPE_CHECKING:
    from kvlab.engine.batching import StepBatch

#: Given each token of a request and its end. One that raises fails its own sample alone.
OutputCallback = Callable[[StepOutput], None]
#: Given each sample of a request when it has ended.
FinishCallback = Callable[[RequestRecord], None]
#: What may be behind steps that do nothing while requests have not ended.
WHY_IDLE = "an order or an engine of a plugin that never lets them go on does this"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment. Counts are since its start; None: the engine does not report it."""

    running: int  # sequences that hold memory
    waiting: int  # sequences in the queue
    batches: int | None = None  # steps that computed something
    prompt_tokens: int | None = None  # of sequences admitted for the first time
    output_tokens: int | None = None
    hit_tokens: int | None = None  # prompt tokens served from the prefix cache
    preemptions: int | None = None
    blocks_total: int | None = None
    blocks_in_use: int | None = None
    blocks_cached: int | None = None  # free, with content that can be found
    tokens_in_use: int | None = None
    kv_usage_percent: float | None = None  # blocks in use, of the pool's
    fragmentation_percent: float | None = None  # token slots of blocks in use that hold no token
    blocks_allocated: int | None = None
    blocks_freed: int | None = None
    evictions: int | None = None  # times that memory was taken from cached content
    evicted_blocks: int | None = None

    @classmethod
    def of_pool(cls, pool: PoolStats, counters: PoolCounters, **own: int) -> EngineStats:
        """What a pool says of itself, beside the engine's `own` fields."""
        return cls(
            prompt_tokens=counters.prompt_tokens,
            hit_tokens=counters.hit_tokens,
            blocks_total=pool.blocks_total,
            blocks_in_use=pool.blocks_in_use,
            blocks_cached=pool.blocks_cached,
            tokens_in_use=pool.tokens_stored,
            kv_usage_percent=100 * pool.block_utilization,
            fragmentation_percent=100 * pool.internal_fragmentation,
            blocks_allocated=counters.blocks_allocated,
            blocks_freed=counters.blocks_freed,
            evictions=counters.evictions,
            evicted_blocks=counters.evicted_blocks,
            **own,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that came from the prefix cache, 0 to 1. None before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens and self.hit_tokens is not None else None


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """What an engine that keeps no steps said of itself from time to time: one value of each column for each time.
    Counters count from the engine's start.
    """

    times_s: Values[float] = ()  # on the engine's clock
    columns: Mapping[str, Values[float]] = field(default_factory=dict)  # as running, waiting, kv_usage (0 to 1)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine tells of itself beside its records."""

    facts: Mapping[str, str] = field(default_factory=dict)  # version, flags and the like, in words
    metrics: Mapping[str, float] = field(default_factory=dict)  # by the names of the laboratory's catalogue
    series: EngineSeries = field(default_factory=EngineSeries)
    unreported: frozenset[str] = frozenset()  # fields of RequestRecord that it cannot tell
    notes: Values[str] = ()  # what a user should know of its figures, a sentence each
    invalid: str | None = None  # why the figures are not to be compared with others


class ServingEngine(Protocol):
    """Serves requests. Single-threaded: its caller calls `step` until `has_work` is false."""

    @property
    def clock(self) -> Clock:
        """The engine's time: what records and arrivals are measured by."""

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """Queue a request. `on_output` is given each token, `on_finish` each sample's record at its end.

        Raises RequestRefusedError, changing nothing, for a request that cannot be served; QueueFullError where the
        waiting queue is full.
        """

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its records are reported before this returns. False if it is not here."""

    def step(self) -> StepRecord | None:
        """Do some work. Returns a record of the step; None if there was nothing to do, or from an engine that keeps
        no steps.
        """

    def has_work(self) -> bool:
        """Whether a request waits, runs, or has ended and still holds memory."""

    def next_wakeup(self) -> float | None:
        """When to call `step` again after it returned None; None: when a request arrives. An engine that keeps no
        steps returns a time that has passed while it works.
        """

    def stats(self) -> EngineStats:
        """The engine as it was after its last step, with the requests that wait now. From any thread, at any time:
        a step that takes long is not waited for.
        """

    def close(self) -> None:
        """Give back what the engine holds. It serves nothing afterwards."""


@runtime_checkable
class Auditable(Protocol):
    """An engine whose memory can be checked."""

    def audit(self) -> list[Finding]:
        """Every broken invariant; empty for sound memory."""


@runtime_checkable
class Reporting(Protocol):
    """An engine that tells of itself beside its records. It holds processes or connections until it is closed."""

    def report(self) -> EngineReport:
        """What there is to tell so far."""


@runtime_checkable
class Repeating(Protocol):
    """An engine that can take steps at once, on a clock that is not waited for."""

    def repeat(self, until_s: float) -> StepLog:
        """The next steps, as far as they are all alike, that begin before `until_s`, when the next request arrives;
        none where `step` has something to decide.
        """


class StepObserver(Protocol):
    """Sees what an EngineCore does, whose `observer` it is. `every_step`: it needs each of them; else those
    that are all alike, and admit nothing, may be taken at once and unseen.
    """

    every_step: bool

    def added(self, first: Sequence) -> None:
        """A request was queued; this is its first sequence, which has the others."""

    def stepped(self, record: StepRecord, batch: StepBatch) -> None:
        """A step has ended. Of `batch` nothing may be kept."""


@runtime_checkable
class Journaled(Protocol):
    """An engine that records what happens to each block, where it was built with a journal."""

    journal: BlockJournal | None
