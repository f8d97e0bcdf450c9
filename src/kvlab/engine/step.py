"""The contract between the engine and what executes its steps: plain data that can be pickled, recorded and sent.

    Executor.execute(StepInput, CacheView) -> StepResult

This module imports neither torch nor the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlab.core import SequenceSpec, TokenLogprobs
from kvlab.engine.plan import StepPlan

if TYPE_CHECKING:
    from kvlab.kv.view import CacheView

Histories = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The sequences that get a token, as columns; S in all, in the order of the rows of logits.

    sequences    [S]        their names, and how their tokens are picked
    num_outputs  [S] int64  output tokens of each so far: the position of the one to be sampled
    histories    row ->     prompt and output so far, of the rows with a repetition penalty
    """

    sequences: tuple[SequenceSpec, ...]
    num_outputs: NDArray[np.int64]
    histories: Histories = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: Sequence[int]) -> SamplingBatch:
        """These rows alone."""
        if len(rows) == len(self.sequences):
            return self
        histories = {new: self.histories[old] for new, old in enumerate(rows) if old in self.histories}
        sequences = tuple(self.sequences[row] for row in rows)
        return SamplingBatch(sequences, self.num_outputs[np.asarray(rows, dtype=np.int64)], histories)


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One forward pass: a flat batch of T tokens from B sequences, S of which get a new token.

    token_ids    [T] int64  the flat batch, sequence after sequence
    num_tokens   [B] int64  how many of them are each sequence's
    sequences    [B]        their names, and how their tokens are picked
    num_outputs  [B] int64  output tokens of each so far
    sampled      [S] int64  which of the B sequences get a new token, ascending
    histories    row of B -> prompt and output so far, of the sampled sequences with a repetition penalty
    """

    token_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    sequences: tuple[SequenceSpec, ...]
    num_outputs: NDArray[np.int64]
    sampled: NDArray[np.int64]
    histories: Histories = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan) -> StepInput:
        """The input of a pass over these sequences."""
        decoding, chunks = plan.decoding, plan.chunks
        size = len(decoding)
        if not chunks:
            rows, ones = np.arange(size), np.ones(size, dtype=np.int64)
            tokens = decoding.last_tokens.copy()
            return cls(tokens, ones, decoding.specs, decoding.num_outputs, rows, decoding.histories())
        first_decode, first_chunk = (len(chunks), 0) if plan.decode_last else (0, size)
        token_ids: list[int] = []
        for sequence, count in chunks:
            token_ids += sequence.token_ids[sequence.num_computed : sequence.num_computed + count]
        sampled = [row for row, chunk in enumerate(chunks, first_chunk) if chunk.samples]
        histories = {first_decode + row: tokens for row, tokens in decoding.histories().items()}
        for row in sampled:
            sequence = chunks[row - first_chunk].sequence
            if sequence.spec.is_penalized:
                histories[row] = tuple(sequence.token_ids)
        specs = [sequence.spec for sequence, _ in chunks]
        return cls(
            token_ids=plan.column(decoding.last_tokens, token_ids),
            num_tokens=plan.num_tokens,
            sequences=tuple(specs) + decoding.specs if plan.decode_last else decoding.specs + tuple(specs),
            num_outputs=plan.column(decoding.num_outputs, [sequence.num_output_tokens for sequence, _ in chunks]),
            sampled=plan.column(np.arange(first_decode, first_decode + size), sampled),
            histories=histories,
        )

    def alone(self, row: int) -> StepInput:
        """The pass of one of the B sequences."""
        end = int(self.num_tokens[: row + 1].sum())
        one = slice(row, row + 1)
        return StepInput(
            token_ids=self.token_ids[end - int(self.num_tokens[row]) : end],
            num_tokens=self.num_tokens[one],
            sequences=self.sequences[one],
            num_outputs=self.num_outputs[one],
            sampled=self.sampled[self.sampled == row] - row,
            histories={0: self.histories[row]} if row in self.histories else {},
        )

    def sampling(self) -> SamplingBatch:
        """The sequences that get a token."""
        everyone = SamplingBatch(self.sequences, self.num_outputs, self.histories)
        return everyone.take(self.sampled.tolist())

    def logits_rows(self) -> NDArray[np.int64]:
        """`[S]` int64: the last token of each sampled sequence in the flat batch, whose logits are needed."""
        last: NDArray[np.int64] = self.num_tokens.cumsum()[self.sampled] - 1
        return last


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass produced: a token for each sampled sequence, in order.

    `logprobs` has an entry for each token, None where the request asked for none; None: no request asked.
    `elapsed_s` is the time that the pass took on a modelled device: an engine with a LogicalClock advances it by
    that much. None: the clock itself knows.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    elapsed_s: float | None = None


class Executor(Protocol):
    """Computes a pass."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """Store the K and V of the flat batch through `view`, and pick a token for each sampled sequence.

        Whatever it raises fails the pass: the engine rolls the view back and runs the sequences again in halves. An
        error with `request_ids` names the requests that caused it.
        """
