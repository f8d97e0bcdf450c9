"""Why tokens of prompts were computed, and not found in the prefix cache."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvlab.core import Salt, Sequence, SequenceStatus, StepRecord
from kvlab.engine.batching import StepBatch
from kvlab.engine.core import EngineCore
from kvlab.kv.content_log import Cleared, ContentEvent, ContentLog, Removed, Stored
from kvlab.kv.lending import follow
from kvlab.kv.pool import BlockPool
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.tiers.base import Key, keys_behind
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.content_numbers import ContentNumbers

# A content's number is 0 if it was never cached, _CACHED, or _CACHED * (2 + the eviction's number) once it was
# evicted; and _IS_PARENT more.
_CACHED = 2
_IS_PARENT = 1  # another content was behind it
_SEVERAL = -1  # instead of a salt's number


class Reason(StrEnum):
    """What became of tokens of a prompt when it was first admitted."""

    FOUND = "found in the prefix cache"
    FIRST_SEEN = "first seen"
    DIVERGED = "behind the block where it diverged from earlier prompts"
    EVICTED = "had been cached, and was evicted"
    OTHER_SALT = "cached under another salt"
    TAIL = "in the last block, which is never found whole"
    GROUPS = "cached, but not for all groups of layers"
    NOT_SHARED = "not shared"


class Eviction(NamedTuple):
    """When a block's content was evicted, and the sequence that needed the most memory in that step."""

    at_s: float
    by: SampleKey | None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt's tokens by reason, which sum to its length; in which of its blocks it diverged, and how the first
    block that had been cached was evicted.
    """

    at_s: float
    tokens: Mapping[Reason, int]
    diverged_at: int | None = None
    eviction: Eviction | None = None


@dataclass(slots=True)
class _Admitted:
    """A prompt as it was when it was admitted: of each whole block the reason for which it may be computed."""

    at_s: float
    reasons: list[Reason]
    diverged_at: int | None
    evictions: dict[int, Eviction]


class PromptObserver:
    """Follows which contents a pool has, and looks at each prompt when it is admitted, before the step's own
    contents. A StepObserver. `has_salts`: of any request, which are then told apart.
    """

    every_step = False  # but `catch_up` behind those that it does not see

    def __init__(self, core: EngineCore, *, has_salts: bool) -> None:
        pool, self._has_salts = core.pool, has_salts
        self._core, self._size = core, pool.block_size
        self._log: ContentLog | None = None
        self._group, self._has_groups = 0, False
        if isinstance(pool, BlockPool) and pool.shares_prefixes:
            windows = [group.layers.window for group in pool.groups]
            self._group = windows.index(None) if None in windows else 0
            self._has_groups = len(windows) > 1
            self._log = follow(pool)
        self._parts = PrefixIndex(self._size).parts
        self._seen = ContentNumbers()  # of contents: see _CACHED
        self._evictions: list[Eviction] = []
        self._salted = ContentNumbers()  # of contents without their salt, where any request has one: its number
        self._salts: dict[Salt, int] = {}  # their numbers
        self._looked_at: dict[Sequence, _Admitted] = {}
        self.prompts: dict[SampleKey, PromptTokens] = {}

    def added(self, first: Sequence) -> None:
        """See StepObserver. A request that was lost with another replica may be here again."""
        self.prompts.pop(first.key, None)

    def stepped(self, record: StepRecord, batch: StepBatch) -> None:
        """See StepObserver."""
        admitted = []
        for sequence in reversed(self._core.scheduler.running):
            if sequence.index:
                continue
            if sequence.key not in self.prompts and sequence not in self._looked_at:
                admitted.append(sequence)
            elif not sequence.preemptions:  # as all before it it was looked at
                break
        for sequence in reversed(admitted):
            self._looked_at[sequence] = self._look(sequence, record.start_s)
        for sequence, looked in list(self._looked_at.items()):
            if sequence.status is not SequenceStatus.LOADING:
                self.prompts[sequence.key] = self._explained(sequence, looked)
                del self._looked_at[sequence]
        chunks = (*batch.prefill, *batch.admitted)
        largest = max(chunks, key=lambda chunk: chunk.num_tokens, default=None)
        self.catch_up(record.start_s, largest.sequence.key if largest else None)

    def catch_up(self, at_s: float, by: SampleKey | None = None) -> None:
        """Take in what became findable and what was evicted since the last call."""
        eviction = Eviction(at_s, by)
        for event in self._log.take() if self._log is not None else ():
            self._take(event, eviction)

    def counts(self) -> Counter[Reason]:
        """Tokens of all prompts by what became of them."""
        counts = Counter[Reason]()
        for prompt in self.prompts.values():
            counts.update(prompt.tokens)
        return counts

    def _take(self, event: ContentEvent, eviction: Eviction) -> None:
        if isinstance(event, Cleared):
            numbers = self._seen.numbers
            is_cached = numbers & ~_IS_PARENT == _CACHED
            numbers[is_cached] += self._evicted_by(eviction) - _CACHED
        elif event.group != self._group:
            return
        elif isinstance(event, Removed):
            self._set(event.keys, self._evicted_by(eviction))
        elif isinstance(event, Stored):
            self._set(event.keys, _CACHED)
            parents = event.keys[:-1] if event.parent is None else [event.parent, *event.keys[:-1]]
            places = self._seen.places(parents)  # first: it may move the numbers
            self._seen.numbers[places] |= _IS_PARENT

    def _set(self, keys: list[Key], state: int) -> None:
        places = self._seen.places(keys)
        self._seen.numbers[places] = self._seen.numbers[places] & _IS_PARENT | state

    def _evicted_by(self, eviction: Eviction) -> int:
        """The state of contents that an eviction took."""
        if not self._evictions or self._evictions[-1] is not eviction:
            self._evictions.append(eviction)
        return _CACHED + _CACHED * len(self._evictions)

    def _look(self, sequence: Sequence, at_s: float) -> _Admitted:
        """What there is of the prompt's blocks."""
        request = sequence.request
        admitted = _Admitted(at_s, [], None, {})
        if self._log is None or sequence.spec.scores_prompt:
            return admitted
        parts = list(self._parts(sequence.token_ids[: sequence.num_prompt_tokens], 0))
        keys = keys_behind(PrefixIndex.root_tokens(request.salt, self._group), parts)
        places = self._seen.places(keys)
        numbers = self._seen.numbers[places].tolist()
        salts = self._salts_of(parts, request.salt) if self._has_salts else [False] * len(keys)
        for number, (known, has_other_salt) in enumerate(zip(numbers, salts, strict=True)):
            if known >= _CACHED:
                admitted.reasons.append(Reason.EVICTED)
                if known >= 2 * _CACHED:
                    admitted.evictions[number] = self._evictions[known // _CACHED - 2]
            elif has_other_salt:
                admitted.reasons.append(Reason.OTHER_SALT)
            else:
                if number and admitted.diverged_at is None and numbers[number - 1] & _IS_PARENT:
                    admitted.diverged_at = number
                is_behind = admitted.diverged_at is not None
                admitted.reasons.append(Reason.DIVERGED if is_behind else Reason.FIRST_SEEN)
        self._seen.numbers[places[:-1]] |= _IS_PARENT
        return admitted

    def _salts_of(self, parts: list[bytes], salt: Salt) -> list[bool]:
        """Of each block whether it came with another salt before."""
        places = self._salted.places(keys_behind((), parts))
        known, own = self._salted.numbers[places], self._salts.setdefault(salt, 1 + len(self._salts))
        has_other = (known != 0) & (known != own)
        self._salted.numbers[places] = np.where(has_other, _SEVERAL, own)
        of_blocks: list[bool] = has_other.tolist()
        return of_blocks

    def _explained(self, sequence: Sequence, looked: _Admitted) -> PromptTokens:
        prompt, size = sequence.num_prompt_tokens, self._size
        cached = min(sequence.cached_tokens, prompt)
        tokens, first = Counter({Reason.FOUND: cached}), cached // size
        eviction = next((lost for number, lost in looked.evictions.items() if number >= first), None)
        for number in range(first, len(looked.reasons)):
            reason, end = looked.reasons[number], (number + 1) * size
            if reason is Reason.EVICTED and eviction is None and end >= prompt:  # it was cached all the while
                reason = Reason.TAIL
            elif reason is Reason.EVICTED and eviction is None and self._has_groups:
                reason = Reason.GROUPS
            tokens[reason] += end - max(number * size, cached)
        left = prompt - tokens.total()
        is_shared = self._log is not None and not sequence.spec.scores_prompt
        tokens[Reason.TAIL if is_shared else Reason.NOT_SHARED] += left
        diverged = looked.diverged_at if tokens[Reason.DIVERGED] else None
        if diverged is not None:  # what was found behind that another replica had computed
            diverged = max(diverged, first)
        return PromptTokens(looked.at_s, {r: n for r, n in tokens.most_common() if n}, diverged, eviction)
