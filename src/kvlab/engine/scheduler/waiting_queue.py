"""The queue of waiting sequences."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from numbers import Real

from kvlab.core import Sequence
from kvlab.errors import ConfigError, shown


class WaitingQueue:
    """Sequences by rank, the lowest first; of equals in the order they came, save those put to the front.

    Finding a position takes O(log n).
    """

    def __init__(self, rank: Callable[[Sequence], float]) -> None:
        self._rank = rank
        self._entries: list[tuple[float, int, Sequence]] = []  # rank, ticket, sequence; no two tickets are equal
        self._positions: dict[Sequence, tuple[float, int]] = {}
        self._first = self._next = 0  # tickets: the lowest given to the front, and the next for the back
        self.prompt_tokens = self.output_tokens = 0  # that all of them have still to compute and to produce

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._positions

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._entries)

    @property
    def head(self) -> Sequence | None:
        """The first in the queue; None: none waits."""
        return self._entries[0][2] if self._entries else None

    def add(self, sequence: Sequence) -> None:
        """Behind all others of its rank."""
        self._insert(sequence, self._next)
        self._next += 1

    def put_first(self, sequences: list[Sequence]) -> None:
        """Before all others of their rank, in this order."""
        for sequence in reversed(sequences):
            self._first -= 1
            self._insert(sequence, self._first)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not there."""
        position = self._positions.pop(sequence, None)
        if position is None:
            return False
        del self._entries[bisect_left(self._entries, position)]
        self._count(sequence, -1)
        return True

    def _insert(self, sequence: Sequence, ticket: int) -> None:
        entry = (self._rank(sequence), ticket, sequence)
        rank: object = entry[0]  # a plugin's may be anything
        if not isinstance(rank, Real) or math.isnan(rank):
            name = shown(sequence.request.request_id)
            order = getattr(self._rank, "__qualname__", repr(self._rank))
            raise ConfigError("scheduler.order", order, f"request {name} has rank {shown(rank)}, no number")
        self._positions[sequence] = entry[:2]
        insort(self._entries, entry)
        self._count(sequence, 1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.prompt_tokens += sign * sequence.num_prompt_tokens
        self.output_tokens += sign * (sequence.request.expected_tokens - len(sequence.token_times_s))
