"""SGLang's admission without a prefix cache: memory by when each sequence ends (`add_one_req_ignore_eos`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class End(NamedTuple):
    """So many steps until a sequence ends, and the tokens that it gives back then, as far as they are known."""

    steps: float
    tokens: int


class Ends:
    """When the sequences of a step end, the next first."""

    def __init__(self, ends: Iterable[End]) -> None:
        self._ends = sorted((end for end in ends if end.steps > 0), key=lambda end: end.steps)

    def add(self, end: End) -> None:
        """One more. The one that ends last of all goes before the last, as in SGLang."""
        if end.steps > 0:
            later = (place for place, other in enumerate(self._ends) if end.steps <= other.steps)
            self._ends.insert(next(later, max(len(self._ends) - 1, 0)), end)

    def most_tokens(self) -> float:
        """The most that all of them take at once beyond what they have: until an end each takes one in a step, and
        one more; what ended before has given back its own.
        """
        most, given_back = 0.0, 0
        for place, end in enumerate(self._ends):
            most = max(most, (end.steps + 1) * (len(self._ends) - place) - given_back)
            given_back += end.tokens
        return most
