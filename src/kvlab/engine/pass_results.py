"""What the sequences of a pass get from it: tokens, and how much of each is computed."""

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Sequence, TokenLogprobs, attended_pairs
from kvlab.engine.batching import BatchBuilder, StepBatch
from kvlab.engine.outputs import OutputProcessor
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.step import StepResult
from kvlab.engine.step_plan import Chunk, DecodeBatch, StepPlan


class PassResults:
    """Updates sequences by the results of passes, and counts the tokens that all of them got."""

    def __init__(self, outputs: OutputProcessor, scheduler: Scheduler, batches: BatchBuilder) -> None:
        self._outputs, self._scheduler, self._batches = outputs, scheduler, batches
        self._batch = StepBatch()
        self.output_tokens = 0

    def process(
        self, batch: StepBatch, plan: StepPlan, result: StepResult, accepted: NDArray[np.int64] | None, now: float
    ) -> None:
        """Update the sequences of a pass of the step `batch`, which ended at `now`: what is computed, and what they
        got, `accepted` proposals included.
        """
        tokens, self._batch = result.token_ids, batch
        logprobs = result.logprobs or [None] * len(tokens)
        self._batch.sampled += len(tokens)
        decoding = len(plan.decoding) + (0 if accepted is None else int(plan.decoding_proposed.sum()))
        first = len(tokens) - decoding if plan.decode_last else decoding
        parts = [(tokens[:first], logprobs[:first]), (tokens[first:], logprobs[first:])]
        decoded, sampled = reversed(parts) if plan.decode_last else parts
        if accepted is None:
            self._process_decoding(plan.decoding, *decoded, now)
        else:
            accepted_decoding = accepted[len(plan.chunks) :] if plan.decode_last else accepted[: len(plan.decoding)]
            self._process_speculated(plan.decoding, *decoded, plan.decoding_proposed, accepted_decoding, now)
        if result.prompt_logprobs:
            plan.keep_scores(result.prompt_logprobs)
        self._process_chunks(plan.chunks, *sampled, now)

    def _process_decoding(
        self, batch: DecodeBatch, tokens: list[int], logprobs: list[TokenLogprobs | None], now: float
    ) -> None:
        known = batch.num_known
        self._batch.context += known
        self._batch.attended += known
        self._batch.vain += batch.num_in_vain
        if not (self._outputs.needs_every_token or self._scheduler.ended or any(logprobs)):
            self.output_tokens += len(tokens) - batch.num_in_vain
            for row in batch.append(tokens, now):
                self._outputs.process(batch.sequences[row], tokens[row])
            return
        for sequence, token, entry in zip(batch.sequences, tokens, logprobs, strict=True):
            self._append(sequence, token, entry, now)
        batch.advance(tokens)

    def _process_speculated(
        self,
        batch: DecodeBatch,
        tokens: list[int],
        logprobs: list[TokenLogprobs | None],
        proposed: NDArray[np.int64],
        accepted: NDArray[np.int64],
        now: float,
    ) -> None:
        """Give each sequence the tokens that were picked behind its newest and behind its accepted proposals."""
        known, first = batch.lengths, 0
        self._batch.context += int((known + proposed).sum())
        self._batch.attended += int(attended_pairs(proposed + 1, known + proposed).sum())
        self._batch.proposed += int(proposed.sum())
        self._batch.accepted += int(accepted.sum())
        newest: list[int] = []
        for sequence, count, taken in zip(batch.sequences, proposed.tolist(), accepted.tolist(), strict=True):
            for place in range(first, first + taken + 1):
                self._append(sequence, tokens[place], logprobs[place], now)
            newest.append(tokens[first + taken])
            first += count + 1
        batch.advance(newest, accepted + 1)

    def _process_chunks(
        self, chunks: list[Chunk], tokens: list[int], logprobs: list[TokenLogprobs | None], now: float
    ) -> None:
        batch, sampled = self._batch, iter(zip(tokens, logprobs, strict=True))
        for sequence, count in chunks:
            after = sequence.num_computed + count
            batch.recomputed += sequence.advance(count)
            batch.context += after
            batch.attended += attended_pairs(count, after)
            if after < len(sequence.token_ids):
                continue
            token, entry = next(sampled)
            if sequence.siblings and not sequence.num_output_tokens and sequence.finish_reason is None:
                self._batches.fork(sequence)
            if not sequence.is_decoding and sequence.finish_reason is None:
                self._scheduler.start_decoding(sequence)
            self._append(sequence, token, entry, now)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        if sequence.finish_reason is not None:  # it decodes in vain, or the callback of another aborted it
            return
        self.output_tokens += 1
        sequence.token_ids.append(token)
        sequence.token_times_s.append(now)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        self._outputs.process(sequence, token)
