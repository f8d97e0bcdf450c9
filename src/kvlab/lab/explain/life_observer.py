"""Follows sequences through an engine, and makes of each a life."""

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Sequence, SequenceStatus, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.batching import StepBatch, Stop
from kvlab.engine.core import EngineCore
from kvlab.engine.step_plan import slots_of
from kvlab.lab.explain.lives import Cause, Life, Timeline
from kvlab.lab.results.requests import SampleKey

_WAITS = {
    Stop.TOKENS: Cause.TOKENS, Stop.SEQUENCES: Cause.SEQUENCES, Stop.BLOCKS: Cause.BLOCKS,
    Stop.POLICY: Cause.POLICY, Stop.LATE: Cause.STEP,
}  # fmt: skip


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
    end was through with the request that the engine was given last; `loading` what it is to wait for content.
    """

    every_step = True

    def __init__(
        self, core: EngineCore, decode_times: DecodeTimes, detail: Collection[str] = (),
        handed_s: Callable[[], float] | None = None, loading: Cause = Cause.TIER,
    ) -> None:  # fmt: skip
        self._loading = loading
        self._core, self._decode_times, self._handed_s = core, decode_times, handed_s
        self._detail = frozenset(detail)
        self._queued: dict[Sequence, Life] = {}  # never admitted
        self._decoders: dict[Sequence, Life] = {}
        self._open: dict[Sequence, Life] = {}  # the others that were admitted, and samples to be forked from them
        self._waits, self._decodes = Timeline(), Timeline()
        self._last_s = 0.0  # the end of the last step
        self._wait = Cause.POLICY  # why it admitted no more
        self.lives: dict[SampleKey, Life] = {}

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
        start_s, end_s = record.start_s, record.end_s
        chunks = {chunk.sequence: chunk.num_tokens for chunk in (*batch.prefill, *batch.admitted)}
        decode_s = self._decode_s(len(batch.decoding), sum(chunks.values()), end_s - start_s)
        self._extend_timelines(batch.stop, start_s, start_s + decode_s, end_s)
        self._see_admitted(start_s, any_preempted=batch.preempted > 0)
        self._see_decoding(batch.decoding.live, start_s)
        self._see_prompts(chunks, start_s, decode_s, end_s)
        for sequence in self._core.scheduler.ended:
            if (ended := self._decoders.pop(sequence, None)) is not None:
                ended.leave(end_s)
        if self._detail and self._wait is Cause.BLOCKS:
            self._see_holders(end_s - start_s)

    def _extend_timelines(self, stop: Stop | None, start_s: float, decoded_s: float, end_s: float) -> None:
        """What a step is to all that wait, and to all that decode."""
        self._waits.add(self._wait, self._last_s, start_s)
        self._wait = Cause.POLICY if stop is None else _WAITS[stop]
        self._waits.add(self._wait, start_s, end_s)
        self._decodes.add(Cause.BETWEEN, self._last_s, start_s)
        self._decodes.add(Cause.DECODE, start_s, decoded_s)
        self._decodes.add(Cause.OTHER_PROMPTS, decoded_s, end_s)
        self._last_s = end_s

    def _see_prompts(self, chunks: dict[Sequence, int], start_s: float, decode_s: float, end_s: float) -> None:
        """What a step is to those that were admitted and do not decode; `chunks` are the tokens of their prompts
        in it.
        """
        tokens = sum(chunks.values())
        firsts = {sample: first for first in chunks for sample in first.siblings or ()}
        for sequence, life in list(self._open.items()):
            self._meanwhile(life, sequence, start_s)
            first = firsts.get(sequence, sequence)
            if first in chunks:
                self._prompt(life, first, chunks[first], tokens, decode_s, end_s)
            else:
                life.add(self._cause_of_waiting(sequence), end_s)
            life.at = sequence.status
            if sequence.finish_reason is not None:
                del self._open[sequence]

    def _see_holders(self, seconds: float) -> None:
        """Who has the blocks that requests of `detail` wait for, in a step of so many seconds."""
        pool, scheduler = self._core.pool, self._core.scheduler
        waiting = [queued for queued in scheduler.waiting if queued.request.request_id in self._detail]
        holding = [running for running in scheduler.running if running.slot is not None] if waiting else []
        blocks = {own.key: -(-pool.get_seq_len(*slots_of([own])) // pool.block_size) for own in holding}
        for sequence in waiting:
            self.lives[sequence.key].holders.update({key: count * seconds for key, count in blocks.items()})

    def _cause_of_waiting(self, sequence: Sequence) -> Cause:
        """Why a step computed nothing of a prompt."""
        if sequence.status is SequenceStatus.LOADING:
            return self._loading
        if sequence.status is SequenceStatus.RUNNING:
            return Cause.TOKENS
        return Cause.RETURN if sequence.preemptions else self._wait

    def ended(self, key: SampleKey, end_s: float) -> Life | None:
        """The whole life of a sample that has ended: what is behind the engine's part is the front end's."""
        life = self.lives.get(key)
        if life is not None:
            life.leave(end_s)
            life.cut(end_s)
            life.add(Cause.FRONT_END, end_s)
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
                    life.add(self._loading, start_s)
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

    def _meanwhile(self, life: Life, sequence: Sequence, start_s: float) -> None:
        """What the gap before a step is, in which nothing was computed."""
        if life.at is SequenceStatus.WAITING and sequence.preemptions:
            # It may have returned meanwhile, to wait for content.
            back_s = min(sequence.resumed_s[-1], start_s) if sequence.resumed_s else start_s
            life.add(Cause.RETURN, max(back_s, life.until_s))
            life.add(self._loading if back_s < start_s else Cause.RETURN, start_s)
        else:
            life.add(self._loading if life.at is SequenceStatus.LOADING else Cause.BETWEEN, start_s)

    def _prompt(self, life: Life, sequence: Sequence, tokens: int, of: int, decode_s: float, end_s: float) -> None:
        """A step with a chunk of the sequence's prompt: its own part, then others'."""
        rest = end_s - life.until_s - decode_s
        is_again = bool(sequence.preemptions)
        life.add(Cause.AGAIN if is_again else Cause.PROMPT, life.until_s + max(rest, 0.0) * tokens / of)
        life.add(Cause.OTHER_PROMPTS, end_s - decode_s)
        life.add(Cause.OTHER_DECODES, end_s)
