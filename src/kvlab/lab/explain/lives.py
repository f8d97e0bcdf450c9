"""A request's life as intervals with a cause, which meet end to end from its arrival to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.core import RequestRecord, Sequence, SequenceStatus, StepRecord
from kvlab.engine.batching import StepBatch, Stop
from kvlab.engine.core import EngineCore
from kvlab.engine.step_plan import slots_of
from kvlab.lab.results.step_log import StepLog

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


_WAITS = {
    Stop.TOKENS: Cause.TOKENS, Stop.SEQUENCES: Cause.SEQUENCES, Stop.BLOCKS: Cause.BLOCKS, Stop.POLICY: Cause.POLICY
}  # fmt: skip


class Interval(NamedTuple):
    """From `start_s` to `end_s`, on the engine's clock."""

    start_s: float
    end_s: float
    cause: Cause


@dataclass(slots=True)
class Life:
    """What a sequence's time went into so far, and of its waits for blocks who had them: block-seconds."""

    key: Key
    intervals: list[Interval]
    until_s: float  # the end of the last interval
    holders: Counter[Key] = field(default_factory=Counter)
    before: int = 0  # in the queue when it came
    at: SequenceStatus = SequenceStatus.WAITING
    last: Cause = Cause.STEP

    def add(self, cause: Cause, end_s: float) -> None:
        """It went on until `end_s`."""
        self.last = cause
        if end_s <= self.until_s:
            return
        previous = self.intervals[-1] if self.intervals else None
        if previous is not None and previous.cause is cause:
            self.intervals[-1] = previous._replace(end_s=end_s)
        else:
            self.intervals.append(Interval(self.until_s, end_s, cause))
        self.until_s = end_s

    def terms_ms(self, until_s: float | None = None) -> dict[Cause, float]:
        """Milliseconds by cause, the longest first; up to a time, where one is given."""
        found: Counter[Cause] = Counter()
        for start_s, end_s, cause in self.intervals:
            end_s = end_s if until_s is None else min(end_s, until_s)
            if end_s > start_s:
                found[cause] += 1000 * (end_s - start_s)  # type: ignore[assignment]
        return dict(found.most_common())


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

    def __init__(
        self,
        core: EngineCore,
        decode_times: DecodeTimes,
        detail: Collection[str] = (),
        handed_s: Callable[[], float] | None = None,
    ) -> None:
        self._core, self._decode_times, self._handed_s = core, decode_times, handed_s
        self._detail = frozenset(detail)
        self._open: dict[Sequence, Life] = {}
        self._firsts: dict[Sequence, Sequence] = {}  # of each further sample
        self.lives: dict[Key, Life] = {}

    def added(self, first: Sequence) -> None:
        """See StepObserver."""
        request = first.request
        now = self._core.clock.now()
        for sequence in (first, *first.siblings):
            life = Life(sequence.key, [], request.arrival_s, before=len(self._core.scheduler.waiting) - 1)
            if self._handed_s is not None:
                life.add(Cause.FRONT_END, self._handed_s())
            life.add(Cause.STEP, now)
            self._open[sequence] = self.lives[sequence.key] = life
            if sequence is not first:
                self._firsts[sequence] = first

    def stepped(self, record: StepRecord, batch: StepBatch) -> None:
        """See StepObserver."""
        if not self._open:
            return
        start_s, end_s = record.start_s, record.end_s
        chunks = {chunk.sequence: chunk.num_tokens for chunk in (*batch.prefill, *batch.admitted)}
        decoding = set(batch.decoding.sequences) if len(self._open) > 1 else batch.decoding.sequences
        decode_s = self._decode_s(len(batch.decoding), sum(chunks.values()), end_s - start_s)
        wait = _WAITS[batch.stop or Stop.SEQUENCES]
        for sequence, life in list(self._open.items()):
            self._wait(life, sequence, start_s)
            first = self._firsts.get(sequence)
            shown = sequence if first is None or sequence in decoding or sequence in chunks else first
            if shown in chunks:
                self._prompt(life, shown, chunks[shown], sum(chunks.values()), decode_s, end_s)
            elif shown in decoding:
                life.add(Cause.DECODE, min(start_s + decode_s, end_s))
                life.add(Cause.OTHER_PROMPTS, end_s)
            elif sequence.status is SequenceStatus.LOADING:
                life.add(Cause.TIER, end_s)
            elif sequence.status is SequenceStatus.RUNNING:
                life.add(Cause.TOKENS, end_s)
            else:
                life.add(Cause.RETURN if sequence.preemptions else wait, end_s)
                if wait is Cause.BLOCKS and sequence.request.request_id in self._detail:
                    life.holders.update(self._held(end_s - start_s))
            life.at = sequence.status
            if sequence.finish_reason is not None:
                del self._open[sequence]
                self._firsts.pop(sequence, None)

    def ended(self, record: RequestRecord) -> Life | None:
        """The whole life of a sample that has ended: what is behind the engine's part is the front end's."""
        life = self.lives.get(record.key)
        if life is not None:
            while life.intervals and life.intervals[-1].start_s >= record.finished_s:  # aborted
                life.until_s = life.intervals.pop().start_s
            if life.intervals and life.until_s > record.finished_s:
                life.intervals[-1] = life.intervals[-1]._replace(end_s=record.finished_s)
                life.until_s = record.finished_s
            life.add(Cause.FRONT_END, record.finished_s)
        return life

    def _decode_s(self, decoding: int, tokens: int, seconds: float) -> float:
        """Of a step's time, that of the sequences that decode."""
        if not decoding or not tokens:
            return seconds if decoding else 0.0
        alone = self._decode_times.of(decoding)
        return min(seconds * decoding / (decoding + tokens) if alone is None else alone, seconds)

    @staticmethod
    def _wait(life: Life, sequence: Sequence, start_s: float) -> None:
        """What the gap before a step is, in which nothing was computed."""
        if life.at is SequenceStatus.WAITING:
            # It may have been admitted meanwhile, to wait for content.
            admitted_s = sequence.resumed_s[-1] if sequence.resumed_s else sequence.scheduled_s
            if admitted_s is not None and life.until_s <= admitted_s < start_s:
                life.add(life.last, admitted_s)
                life.add(Cause.TIER, start_s)
            else:
                life.add(Cause.POLICY if life.last is Cause.STEP else life.last, start_s)
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
        pool, found = self._core.pool, {}
        for sequence in self._core.scheduler.running:
            if sequence.slot is not None:
                tokens = pool.get_seq_len(*slots_of([sequence]))
                found[sequence.key] = -(-tokens // pool.block_size) * seconds
        return found
