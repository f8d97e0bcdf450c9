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
from kvlab.engine.step_plan import Chunk, StepPlan

if TYPE_CHECKING:
    from kvlab.kv.view import CacheView

Histories = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The rows of logits, as columns; R in all. A sequence that gets a token has one, and one for each token that
    is proposed.

    sequences    [R]        their names, and how their tokens are picked
    num_outputs  [R] int64  output tokens before the one to be sampled: its position
    histories    row ->     prompt and output before it, of the rows with a repetition penalty
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
class ScoredTokens:
    """P tokens of prompts, each behind another of the flat batch.

    rows    [P] int64  where in the flat batch the token before each is, ascending
    tokens  [P] int64  the tokens
    counts  [P]        how many alternatives are asked for
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], first: int) -> ScoredTokens | None:
        """Those of the chunks, which begin at `first` of the flat batch; None if nobody asks for any."""
        rows, tokens, counts = list[int](), list[int](), list[int]()
        for chunk in chunks:
            if count := chunk.num_scored:
                begin = chunk.sequence.num_computed
                rows += range(first, first + count)
                tokens += chunk.sequence.token_ids[begin + 1 : begin + 1 + count]
                counts += [chunk.sequence.spec.sampling.prompt_logprobs or 0] * count
            first += chunk.num_tokens
        return (
            cls(np.asarray(rows, dtype=np.int64), np.asarray(tokens, dtype=np.int64), tuple(counts))
            if rows
            else None
        )

    def within(self, first: int, end: int) -> ScoredTokens | None:
        """Those behind tokens `first` to `end` of the flat batch, which begins at `first` then."""
        begin, behind = np.searchsorted(self.rows, [first, end]).tolist()
        part = slice(begin, behind)
        return (
            ScoredTokens(self.rows[part] - first, self.tokens[part], self.counts[part]) if begin < behind else None
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One forward pass: a flat batch of T tokens from B sequences, S of which get a new token.

    token_ids    [T] int64  the flat batch, sequence after sequence
    num_tokens   [B] int64  how many of them are each sequence's
    sequences    [B]        their names, and how their tokens are picked
    num_outputs  [B] int64  output tokens of each so far
    sampled      [S] int64  which of the B sequences get a new token, ascending
    histories    row of B -> prompt and output so far, of the sampled sequences with a repetition penalty
    proposed     [B] int64  of each sequence's tokens, the last ones that are proposed; None: none of any
    scored                  tokens of prompts whose log-probabilities are asked for; None: none
    """

    token_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    sequences: tuple[SequenceSpec, ...]
    num_outputs: NDArray[np.int64]
    sampled: NDArray[np.int64]
    histories: Histories = field(default_factory=dict)
    proposed: NDArray[np.int64] | None = None
    scored: ScoredTokens | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> StepInput:
        """The input of a pass over these sequences."""
        decoding, chunks = plan.decoding, plan.chunks
        size = len(decoding)
        if not chunks and not plan.proposals:
            rows, ones = np.arange(size), np.ones(size, dtype=np.int64)
            tokens = decoding.last_tokens.copy()
            return cls(tokens, ones, decoding.specs, decoding.num_outputs, rows, decoding.histories())
        first_decode, first_chunk = (len(chunks), 0) if plan.decode_last else (0, size)
        parts = [
            np.asarray(sequence.token_ids[sequence.num_computed : sequence.num_computed + count], dtype=np.int64)
            for sequence, count in chunks
        ]
        sampled = [row for row, chunk in enumerate(chunks, first_chunk) if chunk.samples]
        histories = {first_decode + row: tokens for row, tokens in decoding.histories().items()}
        for row in sampled:
            sequence = chunks[row - first_chunk].sequence
            if sequence.spec.needs_history:
                histories[row] = tuple(sequence.token_ids)
        specs = [sequence.spec for sequence, _ in chunks]
        return cls(
            token_ids=np.concatenate(plan.join([plan.decoding_tokens], parts)),
            num_tokens=plan.num_tokens,
            sequences=tuple(specs) + decoding.specs if plan.decode_last else decoding.specs + tuple(specs),
            num_outputs=plan.column(decoding.num_outputs, [sequence.num_output_tokens for sequence, _ in chunks]),
            sampled=plan.column(np.arange(first_decode, first_decode + size), sampled),
            histories=histories,
            proposed=plan.num_proposed if plan.proposals else None,
            scored=ScoredTokens.of(chunks, 0 if plan.decode_last else len(plan.decoding_tokens)),
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
            proposed=None if self.proposed is None else self.proposed[one],
            scored=None if self.scored is None else self.scored.within(end - int(self.num_tokens[row]), end),
        )

    @property
    def num_rows(self) -> int:
        """Rows of logits, each of which gives a token."""
        return len(self.sampled) + (0 if self.proposed is None else int(self.proposed.sum()))

    def sampling(self) -> SamplingBatch:
        """The rows of logits."""
        everyone = SamplingBatch(self.sequences, self.num_outputs, self.histories)
        if self.proposed is None:
            return everyone.take(self.sampled.tolist())
        rows, offsets = self._expanded(self.proposed)
        histories, ends = {}, self.num_tokens.cumsum()
        for place, (row, offset) in enumerate(zip(rows.tolist(), offsets.tolist(), strict=True)):
            if row in self.histories:
                first = int(ends[row] - self.proposed[row])
                histories[place] = self.histories[row] + tuple(self.token_ids[first : first + offset].tolist())
        sequences = tuple(self.sequences[row] for row in rows.tolist())
        return SamplingBatch(sequences, self.num_outputs[rows] + offsets, histories)

    def logits_rows(self) -> NDArray[np.int64]:
        """`[R]` int64: where in the flat batch the tokens are whose logits are needed: the last of each sampled
        sequence, and in front of it as many as are proposed.
        """
        last: NDArray[np.int64] = self.num_tokens.cumsum() - 1
        if self.proposed is None:
            return last[self.sampled]
        rows, offsets = self._expanded(self.proposed)
        return (last - self.proposed)[rows] + offsets

    def count_accepted(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """`[B]` int64: how many of each sequence's proposals are the tokens that were picked in their places, up to
        the first that is not. `token_ids` are those of the rows of logits.
        """
        accepted = np.zeros(len(self.sequences), dtype=np.int64)
        if self.proposed is None:
            return accepted
        rows, offsets = self._expanded(self.proposed)
        to_check = np.flatnonzero(offsets < self.proposed[rows])
        expected = self.token_ids[self.logits_rows()[to_check] + 1].tolist()
        for place, token in zip(to_check.tolist(), expected, strict=True):
            row = rows[place]
            accepted[row] += accepted[row] == offsets[place] and token == token_ids[place]
        return accepted

    def _expanded(self, proposed: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each row of logits which of the B sequences it is, and how many proposals are before it."""
        counts = 1 + proposed[self.sampled]
        first = np.repeat(counts.cumsum() - counts, counts)
        return np.repeat(self.sampled, counts), np.arange(counts.sum()) - first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass produced: a token for each row of logits, in order.

    `logprobs` has an entry for each token, None where the request asked for none; None: no request asked.
    `prompt_logprobs` has an entry for each of the pass's scored tokens; a modelled device has none.
    `elapsed_s` is the time that the pass took on a modelled device: an engine with a LogicalClock advances it by
    that much. None: the clock itself knows.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    elapsed_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Executor(Protocol):
    """Computes a pass."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """Store the K and V of the flat batch through `view`, and pick a token for each row of logits.

        Whatever it raises fails the pass: the engine rolls the view back and runs the sequences again in halves. An
        error with `request_ids` names the requests that caused it.
        """
