"""A request's life as intervals with a cause, which meet end to end from its arrival to its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.core import RequestRecord, Sequence, SequenceStatus, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.batching import StepBatch, Stop
from kvlab.engine.core import EngineCore
from kvlab.engine.step_plan import slots_of

Key = tuple[str, int]  # a request's id and which of its samples it is


class Cause(StrEnum):
    """What a request's time went into."""

    FRONT_END = "the front end"
    STEP = "a step was under way"
    TOKENS = "waited: the step's tokens were planned"
    SEQUENCES = "waited: enough sequences ran"
    BLOCKS = "waited: too few blocks were free"
    POLICY = "waited: the policy admitted none"
    TIER = "waited for blocks from a tier"
    RETURN = "preempted, waited to return"
    AGAIN = "computed again after a preemption"
    PROMPT = "its own prompt"
    OTHER_PROMPTS = "prompts of others beside it"
    OTHER_DECODES = "decoding of others beside its prompt"
    DECODE = "decoding"
    BETWEEN = "between steps"
    UNEXPLAINED = "not explained by the simulation"


_WAITS = {
    Stop.TOKENS: Cause.TOKENS, Stop.SEQUENCES: Cause.SEQUENCES, Stop.BLOCKS: Cause.BLOCKS, Stop.POLICY: Cause.POLICY
}  # fmt: skip

_CAUSES = tuple(Cause)
_OF_STEP = 4  # intervals that a step may add to a timeline, and the one before


class Interval(NamedTuple):
    """From `start_s` to `end_s`, on the engine's clock."""

    start_s: float
    end_s: float
    cause: Cause


class Timeline:
    """Intervals that meet end to end, which many sequences have in common: of those that wait, or that decode. So a
    step takes no time for each of them.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._columns: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._intervals)

    def add(self, cause: Cause, start_s: float, end_s: float) -> None:
        """It goes on until `end_s`."""
        last = self._intervals[-1] if self._intervals else None
        if last is not None and last.cause is cause:
            self._intervals[-1] = last._replace(end_s=end_s)
        elif end_s > start_s:
            self._intervals.append(Interval(start_s, end_s, cause))
        self._columns = None

    def between(self, first: int, start_s: float, end_s: float) -> Iterator[Interval]:
        """What is in a time, which begins in the interval number `first`."""
        for number in range(first, len(self._intervals)):
            interval = self._intervals[number]
            start, end = max(interval.start_s, start_s), min(interval.end_s, end_s)
            if start >= end_s:
                return
            if end > start:
                yield Interval(start, end, interval.cause)

    def seconds(self, first: int, start_s: float, end_s: float) -> dict[Cause, float]:
        """The same by cause."""
        if self._columns is None:
            starts, ends, causes = zip(*self._intervals, strict=True)
            self._columns = np.array(starts), np.array(ends), np.array([_CAUSES.index(cause) for cause in causes])
        starts_s, ends_s, numbers = self._columns
        last = int(np.searchsorted(starts_s, end_s))
        lengths = np.minimum(ends_s[first:last], end_s) - np.maximum(starts_s[first:last], start_s)
        sums = np.bincount(numbers[first:last], np.maximum(lengths, 0.0), len(_CAUSES))
        return {_CAUSES[number]: float(sums[number]) for number in np.flatnonzero(sums)}


class _Part(NamedTuple):
    """What a life has of a timeline."""

    timeline: Timeline
    first: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Life:
    """What a sequence's time went into so far, and of its waits for blocks who had them: block-seconds."""

    key: Key
    parts: list[Interval | _Part]
    until_s: float  # the end of the last of them
    holders: Counter[Key] = field(default_factory=Counter)
    before: int = 0  # in the queue when it came
    at: SequenceStatus = SequenceStatus.WAITING  # behind the last step in which it was looked at
    _joined: tuple[Timeline, int] | None = None

    def add(self, cause: Cause, end_s: float) -> None:
        """It went on until `end_s`."""
        if end_s <= self.until_s:
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Interval) and last.cause is cause:
            self.parts[-1] = last._replace(end_s=end_s)
        else:
            self.parts.append(Interval(self.until_s, end_s, cause))
        self.until_s = end_s

    def join(self, timeline: Timeline) -> None:
        """From its last time on, which is in the last step or behind it, it does what the timeline says."""
        self._joined = timeline, max(len(timeline) - _OF_STEP, 0)

    def leave(self, end_s: float) -> None:
        """It does so no more from `end_s` on."""
        if self._joined is not None and end_s > self.until_s:
            self.parts.append(_Part(*self._joined, self.until_s, end_s))
            self.until_s = end_s
        self._joined = None

    def cut(self, end_s: float) -> None:
        """It ended before what was noted last."""
        while self.parts and self.until_s > end_s:
            last = self.parts.pop()
            self.until_s = last.start_s
            if last.start_s < end_s:
                self.parts.append(last._replace(end_s=end_s))
                self.until_s = end_s

    @property
    def intervals(self) -> list[Interval]:
        """All of it."""
        intervals: list[Interval] = []
        for part in self.parts:
            intervals += [part] if isinstance(part, Interval) else part.timeline.between(*part[1:])
        return intervals

    def terms_ms(self, until_s: float = math.inf) -> dict[Cause, float]:
        """Milliseconds by cause, the longest first; up to a time, where one is given."""
        by_cause: dict[Cause, float] = {}
        for part in self.parts:
            end_s = min(part.end_s, until_s)
            if end_s <= part.start_s:
                break
            if isinstance(part, Interval):
                terms = {part.cause: end_s - part.start_s}
            else:
                terms = part.timeline.seconds(part.first, part.start_s, end_s)
            for cause, seconds in terms.items():
                by_cause[cause] = by_cause.get(cause, 0.0) + 1000 * seconds
        return dict(sorted(by_cause.items(), key=lambda term: -term[1]))


class DecodeTimes:
    """What a step takes that only decodes, by how many sequences do: medians of a run's own steps, in seconds,
    linear in between.
    """

    def __init__(self, steps: StepLog) -> None:
        seconds, batch = steps.seconds, steps.column("batch_seqs")
        plain = (steps.column("prefill_tokens") == 0) & (batch > 0)
        sizes: NDArray[np.int64] = np.unique(batch[plain])
        self._sizes = sizes
        self._seconds = [float(np.median(seconds[plain & (batch == size)])) for size in sizes]

    def of(self, sequences: int) -> float | None:
        """For so many sequences; None: the run has no such step."""
        return float(np.interp(sequences, self._sizes, self._seconds)) if self._seconds else None


class LifeObserver:
    """Follows sequences through an engine. A step's time is what its decoding sequences alone would take, and the
    rest is that of the prompts in it, by their tokens.

    Of the requests of `detail` it is kept who had the blocks that they waited for. `handed_s` says when the front
    end was through with the request that the engine was given last.
    """

    every_step = True

    def __init__(
        self, core: EngineCore, decode_times: DecodeTimes, detail: Collection[str] = (),
        handed_s: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._core, self._decode_times, self._handed_s = core, decode_times, handed_s
        self._detail = frozenset(detail)
        self._queued: dict[Sequence, Life] = {}  # never admitted
        self._decoders: dict[Sequence, Life] = {}
        self._open: dict[Sequence, Life] = {}  # the others that were admitted, and samples to be forked from them
        self._waits, self._decodes = Timeline(), Timeline()
        self._last_s = 0.0  # the end of the last step
        self._wait = Cause.POLICY  # why it admitted no more
        self.lives: dict[Key, Life] = {}

    def added(self, first: Sequence) -> None:
        """See StepObserver."""
        before = len(self._core.scheduler.waiting) - 1
        for sequence in (first, *first.siblings):
            life = Life(sequence.key, [], first.request.arrival_s, before=before)
            if self._handed_s is not None:
                life.add(Cause.FRONT_END, self._handed_s())
            life.add(Cause.STEP, self._core.clock.now())
            life.join(self._waits)
            self._queued[sequence] = self.lives[sequence.key] = life

    def stepped(self, record: StepRecord, batch: StepBatch) -> None:
        """See StepObserver."""
        start_s, end_s, scheduler = record.start_s, record.end_s, self._core.scheduler
        chunks = {chunk.sequence: chunk.num_tokens for chunk in (*batch.prefill, *batch.admitted)}
        tokens = sum(chunks.values())
        decode_s = self._decode_s(len(batch.decoding), tokens, end_s - start_s)
        self._waits.add(self._wait, self._last_s, start_s)
        self._wait = Cause.POLICY if batch.stop is None else _WAITS[batch.stop]
        self._waits.add(self._wait, start_s, end_s)
        self._decodes.add(Cause.BETWEEN, self._last_s, start_s)
        self._decodes.add(Cause.DECODE, start_s, start_s + decode_s)
        self._decodes.add(Cause.OTHER_PROMPTS, start_s + decode_s, end_s)
        self._last_s = end_s
        self._see_admitted(start_s, any_preempted=batch.preempted > 0)
        self._see_decoding(batch.decoding.sequences, start_s)
        firsts = {sample: first for first in chunks for sample in first.siblings or ()}
        for sequence, life in list(self._open.items()):
            self._meanwhile(life, sequence, start_s)
            first = firsts.get(sequence, sequence)
            if first in chunks:
                self._prompt(life, first, chunks[first], tokens, decode_s, end_s)
            elif sequence.status is SequenceStatus.LOADING:
                life.add(Cause.TIER, end_s)
            elif sequence.status is SequenceStatus.RUNNING:
                life.add(Cause.TOKENS, end_s)
            else:
                life.add(Cause.RETURN if sequence.preemptions else self._wait, end_s)
            life.at = sequence.status
            if sequence.finish_reason is not None:
                del self._open[sequence]
        for sequence in scheduler.ended:
            if (ended := self._decoders.pop(sequence, None)) is not None:
                ended.leave(end_s)
        if self._detail and self._wait is Cause.BLOCKS:
            waiting = [queued for queued in scheduler.waiting if queued.request.request_id in self._detail]
            held = self._held(end_s - start_s) if waiting else {}
            for sequence in waiting:
                self.lives[sequence.key].holders.update(held)

    def ended(self, record: RequestRecord) -> Life | None:
        """The whole life of a sample that has ended: what is behind the engine's part is the front end's."""
        life = self.lives.get(record.key)
        if life is not None:
            life.leave(record.finished_s)
            life.cut(record.finished_s)
            life.add(Cause.FRONT_END, record.finished_s)
        return life

    def _see_admitted(self, start_s: float, *, any_preempted: bool) -> None:
        """Those that wait for the first time no more: at the end of the running ones, or preempted at once."""
        scheduler, admitted = self._core.scheduler, list[Sequence]()
        for sequence in reversed(scheduler.running):
            if sequence in self._queued:
                admitted.append(sequence)
            elif not sequence.index and not sequence.preemptions:
                break
        if any_preempted:
            admitted += [sample for sample in scheduler.waiting if sample.preemptions and sample in self._queued]
        for sequence in admitted:
            # It may have been admitted before the step, to wait for content.
            at_s = start_s if sequence.scheduled_s is None else min(sequence.scheduled_s, start_s)
            for sample in (sequence, *sequence.siblings):
                if (life := self._queued.pop(sample, None)) is not None:
                    life.leave(at_s)
                    life.add(Cause.TIER, start_s)
                    self._open[sample] = life

    def _see_decoding(self, decoding: list[Sequence], start_s: float) -> None:
        """Those that decode in the step, and those that do so no more."""
        candidates = [opened for opened in self._open if opened.is_decoding]
        if not candidates and len(decoding) == len(self._decoders):
            return
        there = set(decoding)
        for sequence in candidates:
            if sequence in there:
                life = self._decoders[sequence] = self._open.pop(sequence)
                life.add(Cause.BETWEEN, start_s)
                life.join(self._decodes)
        if len(decoding) != len(self._decoders):
            for sequence in [opened for opened in self._decoders if opened not in there]:
                life = self._open[sequence] = self._decoders.pop(sequence)
                life.leave(start_s)
                life.at = SequenceStatus.RUNNING

    def _decode_s(self, decoding: int, tokens: int, seconds: float) -> float:
        """Of a step's time, that of the sequences that decode."""
        if not decoding or not tokens:
            return seconds if decoding else 0.0
        alone = self._decode_times.of(decoding)
        return min(seconds * decoding / (decoding + tokens) if alone is None else alone, seconds)

    @staticmethod
    def _meanwhile(life: Life, sequence: Sequence, start_s: float) -> None:
        """What the gap before a step is, in which nothing was computed."""
        if life.at is SequenceStatus.WAITING and sequence.preemptions:
            # It may have returned meanwhile, to wait for content.
            back_s = min(sequence.resumed_s[-1], start_s) if sequence.resumed_s else start_s
            life.add(Cause.RETURN, max(back_s, life.until_s))
            life.add(Cause.TIER if back_s < start_s else Cause.RETURN, start_s)
        else:
            life.add(Cause.TIER if life.at is SequenceStatus.LOADING else Cause.BETWEEN, start_s)

    def _prompt(self, life: Life, sequence: Sequence, tokens: int, of: int, decode_s: float, end_s: float) -> None:
        """A step with a chunk of the sequence's prompt: its own part, then others'."""
        rest = end_s - life.until_s - decode_s
        is_again = bool(sequence.preemptions)
        life.add(Cause.AGAIN if is_again else Cause.PROMPT, life.until_s + max(rest, 0.0) * tokens / of)
        life.add(Cause.OTHER_PROMPTS, end_s - decode_s)
        life.add(Cause.OTHER_DECODES, end_s)

    def _held(self, seconds: float) -> dict[Key, float]:
        """Block-seconds of the running sequences."""
        pool, held = self._core.pool, {}
        for sequence in self._core.scheduler.running:
            if sequence.slot is not None:
                tokens = pool.get_seq_len(*slots_of([sequence]))
                held[sequence.key] = -(-tokens // pool.block_size) * seconds
        return held
