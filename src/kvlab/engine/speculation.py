"""Speculative decoding: tokens that are cheap to guess, checked by the model in one step (Leviathan et al., 2023).

    known:    ... the cat sat on the          the newest token has no K and V yet
    step:                        the | mat and sat      computed at once: the newest, and what is proposed behind it
    sampled:                           mat and  ran     at each of them the model's own next token
    output:                            mat and  ran     as far as the proposals are the model's own, and one more

A proposal is kept where it is the token that the model picks at that position, with that position's own random
number: the output is that of decoding one token at a time, greedy or sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab import core
from kvlab.errors import ConfigError, shown
from kvlab.registry import Registry

if TYPE_CHECKING:
    from kvlab.config import SpeculationConfig


class Proposer(ABC):
    """Guesses how one sequence goes on. Each sequence has its own, which may remember what it has seen of it."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config

    @abstractmethod
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens of the vocabulary that may follow these, the sequence's prompt and output; none
        where it has no guess. From call to call tokens are only added.
        """


PROPOSERS: Registry[type[Proposer]] = Registry("scheduler.speculation.method")


@PROPOSERS.register("ngram")
class NgramProposer(Proposer):
    """What followed the last time that the newest tokens occurred (prompt lookup decoding, Saxena, 2023).

    It looks for as many as possible of the `prompt_lookup_max` newest tokens, at least `prompt_lookup_min`; of
    several places the latest counts. A copy that reaches the end of the sequence goes on with what it has copied.
    Places where the same `prompt_lookup_min` tokens end are chained, as in LZ77, so that no step looks through the
    whole sequence.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._latest: dict[tuple[int, ...], int] = {}  # where each n-gram of the least length ended last
        # Where the n-gram that ends at each position ended before; -1: nowhere.
        self._before = array("q", [-1] * (config.prompt_lookup_min - 1))

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        last, least = len(token_ids) - 1, self.config.prompt_lookup_min
        for end in range(len(self._before), last):
            ngram = tuple(token_ids[end - least + 1 : end + 1])
            self._before.append(self._latest.get(ngram, -1))
            self._latest[ngram] = end
        match = self._find(token_ids, tuple(token_ids[-least:]))
        if match is None:
            return []
        proposed: list[int] = []
        for place in range(match + 1, match + 1 + count):
            proposed.append(token_ids[place] if place <= last else proposed[place - last - 1])
        return proposed

    def _find(self, token_ids: Sequence[int], ngram: tuple[int, ...]) -> int | None:
        """Where the longest n-gram at the end of these ended before, which ends in this one."""
        last, most, longest, best = len(token_ids) - 1, self.config.prompt_lookup_max, 0, None
        place = self._latest.get(ngram, -1)
        while place >= 0 and longest < most:
            length = len(ngram)
            while length < most and length <= place and token_ids[place - length] == token_ids[last - length]:
                length += 1
            if length > longest:
                longest, best = length, place
            place = self._before[place]
        return best


class Speculation:
    """Proposals for the sequences that decode."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._kind = None if config.method is None else PROPOSERS.get(config.method)
        self._is_own = self._kind is None or self._kind.__module__.startswith("kvlab.")
        self.vocab_size: int | None = None  # of the model; None: not known
        self._proposers: dict[core.Sequence, Proposer] = {}

    def propose(self, sequences: Sequence[core.Sequence], budget: int) -> dict[int, list[int]]:
        """Tokens for each slot, at most `budget` in all. None that its output has no room for: the last token of an
        output is not computed. And none from a stop token on. Raises ConfigError for what a plugin may not propose.
        """
        proposals: dict[int, list[int]] = {}
        if self._kind is None:
            return proposals
        for sequence in sequences:
            left = sequence.max_total_tokens - len(sequence.token_ids) - 1
            count = min(self._config.num_speculative_tokens, left, budget)
            if count <= 0 or sequence.slot is None:
                continue
            proposer = self._proposers.get(sequence)
            if proposer is None:
                proposer = self._proposers[sequence] = self._kind(self._config)
            known = len(sequence.token_ids)
            answer = proposer.propose(sequence.token_ids, count)
            if not self._is_own and (wrong := self._wrong(answer, known != len(sequence.token_ids))):
                text = f"{type(proposer).__name__}.propose {wrong}"
                raise ConfigError("scheduler.speculation.method", self._config.method, text)
            proposed = _until_stop(list(answer[:count]), sequence.stop_token_ids)
            if proposed:
                proposals[sequence.slot] = proposed
                budget -= len(proposed)
        return proposals

    def _wrong(self, answer: object, has_changed: bool) -> str | None:
        """Why a plugin's answer cannot be used, which kernels would take for rows of the embedding."""
        if has_changed:
            return "changed the tokens of the sequence, which it may only read"
        if not isinstance(answer, list | tuple) or not all(type(token) is int for token in answer):
            return f"returned {shown(answer, repr)}; must be a list of token ids"
        size = self.vocab_size
        if beyond := [token for token in answer if token < 0 or (size is not None and token >= size)]:
            return f"returned the token {shown(beyond[0])}, which the vocabulary of {size} does not have"
        return None

    def forget(self, sequence: core.Sequence) -> None:
        """The sequence has ended."""
        self._proposers.pop(sequence, None)


def _until_stop(token_ids: list[int], stops: frozenset[int]) -> list[int]:
    return next((token_ids[:place] for place, token in enumerate(token_ids) if token in stops), token_ids)
