"""What takes part in a forward pass: sequences that decode, and chunks of those in prefill."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Sequence, SequenceSpec, TokenLogprobs
from kvlab.hashed_prompt import TokenList

T = TypeVar("T")
_LAST, _LENGTH, _PROMPT, _LIMIT, _SLOT = range(5)  # columns


class Chunk(NamedTuple):
    """A sequence and how many of its tokens a pass computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the pass computes its last known token, so that a new one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt behind its first, whose log-probabilities the pass computes because they are asked
        for.
        """
        sequence = self.sequence
        if not sequence.spec.scores_prompt:
            return 0
        return max(0, min(self.num_tokens, sequence.num_prompt_tokens - 1 - sequence.num_computed))


class DecodeBatch:
    """Sequences that decode, as columns that are kept from step to step, in the order in which they began to.

    With thousands of sequences most of a step's time is spent on waiting for their objects' memory. A step that
    decodes therefore appends to each sequence's lists, and touches nothing else of a sequence.
    """

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self.sequences: list[Sequence] = []
        self._columns: NDArray[np.int64] = np.empty((5, 0), dtype=np.int64)
        self._token_ids: list[TokenList] = []
        self._times: list[list[float]] = []
        self._stops: list[frozenset[int]] = []
        self._specs: list[SequenceSpec] = []
        self._any_stop: set[int] = set()  # at least those of all sequences
        self._any_penalty = False
        self._in_vain: set[int] = set()  # slots
        self.add(list(sequences))

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> NDArray[np.int64]:
        """The pool's slots of the sequences."""
        slots: NDArray[np.int64] = self._columns[_SLOT]
        return slots

    @property
    def specs(self) -> tuple[SequenceSpec, ...]:
        """What an executor needs to know of the sequences."""
        return tuple(self._specs)

    @property
    def last_tokens(self) -> NDArray[np.int64]:
        """The newest token of each sequence."""
        last: NDArray[np.int64] = self._columns[_LAST]
        return last

    @property
    def num_outputs(self) -> NDArray[np.int64]:
        """Output tokens of each sequence so far."""
        outputs: NDArray[np.int64] = self._columns[_LENGTH] - self._columns[_PROMPT]
        return outputs

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, the newest included."""
        lengths: NDArray[np.int64] = self._columns[_LENGTH]
        return lengths

    @property
    def num_known(self) -> int:
        """Tokens of all sequences together, the newest included."""
        return int(self._columns[_LENGTH].sum())

    def histories(self) -> dict[int, tuple[int, ...]]:
        """The tokens so far of the rows with a repetition penalty."""
        if not self._any_penalty:
            return {}
        return {row: tuple(self._token_ids[row]) for row, spec in enumerate(self._specs) if spec.needs_history}

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences decode from the next step on."""
        if not sequences:
            return
        rows = [
            (s.token_ids[-1], len(s.token_ids), s.num_prompt_tokens, s.ends_at, slots_of([s])[0]) for s in sequences
        ]
        self._columns = np.concatenate([self._columns, np.asarray(rows, dtype=np.int64).T], axis=1)
        self.sequences += sequences
        self._token_ids += [sequence.token_ids for sequence in sequences]
        self._times += [sequence.token_times_s for sequence in sequences]
        self._stops += [sequence.stop_token_ids for sequence in sequences]
        self._specs += [sequence.spec for sequence in sequences]
        self._any_stop.update(*(sequence.stop_token_ids for sequence in sequences))
        self._any_penalty = self._any_penalty or any(sequence.spec.needs_history for sequence in sequences)

    def remove(self, slots: Collection[int]) -> None:
        """The sequences in these slots do not decode any more; of slots of others nothing changes."""
        if not slots:
            return
        self._in_vain.difference_update(slots)
        leave = (self._columns[_SLOT][:, None] == list(slots)).any(axis=1)  # few: isin sorts, and takes longer
        self._columns = self._columns[:, ~leave]
        for row in np.flatnonzero(leave)[::-1].tolist():
            for column in (self.sequences, self._token_ids, self._times, self._stops, self._specs):
                del column[row]

    def decode_in_vain(self, slots: Iterable[int]) -> None:
        """The sequences in these slots have ended. They decode once more, and nobody gets the tokens."""
        for slot in slots:
            for row in np.flatnonzero(self._columns[_SLOT] == slot).tolist():
                self._token_ids[row], self._times[row], self._stops[row] = [], [], frozenset()
                self._columns[_LIMIT, row] = np.iinfo(np.int64).max
                self._in_vain.add(slot)

    @property
    def num_in_vain(self) -> int:
        """How many sequences decode though they have ended."""
        return len(self._in_vain)

    @property
    def live(self) -> list[Sequence]:
        """The other sequences."""
        if not self._in_vain:
            return self.sequences
        slots = self._columns[_SLOT].tolist()
        return [each for each, slot in zip(self.sequences, slots, strict=True) if slot not in self._in_vain]

    @property
    def steps_left(self) -> int:
        """Steps until a sequence gets its last token, unless a stop token ends one before."""
        columns = self._columns
        return int((columns[_LIMIT] - columns[_LENGTH]).min(initial=2**31))

    @property
    def may_stop(self) -> bool:
        """Whether a stop token may end a sequence."""
        return bool(self._any_stop)

    def steps_to_stop(self, token_ids: NDArray[np.int64]) -> int | None:
        """Of steps that give these tokens `[steps, B]`, how many until one ends a sequence; None: none does."""
        if not self._any_stop:
            return None
        places = np.argwhere(np.isin(token_ids, list(self._any_stop))).tolist()
        return next((step + 1 for step, row in places if token_ids[step, row] in self._stops[row]), None)

    def extend(self, token_ids: NDArray[np.int64], times: list[float]) -> list[int]:
        """Give each of B sequences its next tokens `[steps, B]`, at these times: at most `steps_left`, and none
        behind the first `steps_to_stop`. Returns the rows of those that have got their last.
        """
        for tokens, known, row in zip(self._token_ids, self._times, token_ids.T.tolist(), strict=True):
            tokens.extend(row)
            known += times
        return self.advance(token_ids[-1].tolist(), len(token_ids))

    def append(self, token_ids: list[int], now: float) -> list[int]:
        """Give each sequence its next token, at `now`. Returns the rows of those that have got their last."""
        for tokens, times, token in zip(self._token_ids, self._times, token_ids, strict=True):
            tokens.append(token)
            times.append(now)
        return self.advance(token_ids)

    def advance(self, token_ids: list[int], counts: NDArray[np.int64] | int = 1) -> list[int]:
        """As `append`, for tokens that the sequences have already: the newest, and how many each has got."""
        self._columns[_LAST] = token_ids
        self._columns[_LENGTH] += counts
        ended = set(np.flatnonzero(self._columns[_LENGTH] >= self._columns[_LIMIT]).tolist())
        if not self._any_stop.isdisjoint(token_ids):
            stops = enumerate(zip(token_ids, self._stops, strict=True))
            ended.update(row for row, (token, stopping) in stops if token in stopping)
        return sorted(ended)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A forward pass. In the flat batch the sequences that decode come before the chunks, or behind them.

    A sequence that decodes computes its newest token, and behind it what is proposed for its slot.
    """

    decoding: DecodeBatch
    chunks: list[Chunk] = field(default_factory=list)
    decode_last: bool = False
    proposals: Mapping[int, list[int]] = field(default_factory=dict)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that take part, in the order of the flat batch."""
        return self.join(self.decoding.sequences, [sequence for sequence, _ in self.chunks])

    @property
    def slots(self) -> NDArray[np.int64]:
        """The pool's slots of the sequences."""
        return self.column(self.decoding.slots, slots_of(sequence for sequence, _ in self.chunks))

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        counts = [count for _, count in self.chunks]
        if self.proposals:
            return self.column(1 + self.decoding_proposed, counts)
        return self.column(np.ones(len(self.decoding), dtype=np.int64), counts)

    @property
    def decoding_proposed(self) -> NDArray[np.int64]:
        """Tokens proposed for each sequence that decodes."""
        proposals = self.proposals
        return np.asarray([len(proposals.get(slot, ())) for slot in self.decoding.slots.tolist()], dtype=np.int64)

    @property
    def num_proposed(self) -> NDArray[np.int64]:
        """Of the tokens of each sequence, the last ones that are proposed."""
        return self.column(self.decoding_proposed, [0] * len(self.chunks))

    @property
    def decoding_tokens(self) -> NDArray[np.int64]:
        """The tokens of the sequences that decode, one sequence after another."""
        if not self.proposals:
            return self.decoding.last_tokens
        rows = zip(self.decoding.last_tokens.tolist(), self.decoding.slots.tolist(), strict=True)
        tokens = [token for last, slot in rows for token in (last, *self.proposals.get(slot, ()))]
        return np.asarray(tokens, np.int64)

    def keep_scores(self, logprobs: list[TokenLogprobs]) -> None:
        """Keep what a pass computed of its chunks' prompts, before they advance. A prompt that is computed again
        replaces its entries.
        """
        first = 0
        for chunk in self.chunks:
            begin, count = chunk.sequence.num_computed, chunk.num_scored
            chunk.sequence.prompt_logprobs[begin : begin + count] = logprobs[first : first + count]
            first += count

    def column(self, decoding: NDArray[np.int64], chunks: list[int]) -> NDArray[np.int64]:
        """As `join`, of numbers."""
        return np.concatenate(self.join([decoding], [np.asarray(chunks, dtype=np.int64)]))

    def join(self, decoding: list[T], chunks: list[T]) -> list[T]:
        """Values of the sequences that decode and of the chunks, in the order of the flat batch."""
        return chunks + decoding if self.decode_last else decoding + chunks

    def __len__(self) -> int:
        return len(self.decoding) + len(self.chunks)


def slots_of(sequences: Iterable[Sequence]) -> list[int]:
    """The pool's slots of sequences that run."""
    slots = []
    for sequence in sequences:
        if sequence.slot is None:
            raise RuntimeError(f"request {sequence.request.request_id!r} runs without a slot")
        slots.append(sequence.slot)
    return slots
