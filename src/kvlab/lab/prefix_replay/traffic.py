"""A workload as the ledger sees it: which blocks each request looks up and stores, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Request
from kvlab.hashed_prompt import HashedPrompt, TokenIds

NEVER = 2**62  # the next use of what is not used again


@dataclass(slots=True, eq=False)
class Visit:
    """A request. `contents` are the full blocks that it stores, by number: equal numbers are equal tokens behind
    equal prefixes. It looks up the first `looked_up` of them, its prompt. `next_uses` says of each which visit
    looks it up next, by its index.
    """

    contents: NDArray[np.int64]
    looked_up: int
    has_tail: bool  # takes one more block, which is not full
    follows: Visit | None  # the one before it in its conversation
    next_uses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def blocks(self) -> int:
        """Blocks that it takes."""
        return len(self.contents) + self.has_tail


@dataclass(frozen=True, slots=True)
class Traffic:
    """The visits of a workload, with its prompt tokens in all, the number of different contents, and the blocks
    that would be found if none were ever evicted.
    """

    visits: list[Visit]
    block_size: int
    prompt_tokens: int
    contents: int
    found_at_most: int

    @property
    def longest(self) -> int:
        """The most blocks that one visit takes."""
        return max(visit.blocks for visit in self.visits)

    def hit_rate(self, blocks: int) -> float:
        """The share of prompt tokens that this many blocks hold."""
        return blocks * self.block_size / self.prompt_tokens


@dataclass(slots=True)
class _Sequence:
    """A request's tokens so far, and what a later turn goes on from."""

    place: tuple[float, int]  # when it comes, and which turn of its conversation it is
    follows: str | None
    output: int  # tokens that are not stored yet
    rest: NDArray[np.int64]  # tokens behind the last full block
    key: bytes = b""  # of the last full block and all before it
    contents: list[int] = field(default_factory=list)
    looked_up: int = 0  # blocks
    stored: int = 0  # tokens


def read_traffic(requests: Iterable[Request], block_size: int) -> Traffic:
    """The traffic of requests, by arrival. The next turn of a conversation comes `arrival_s` after the turn
    before it, as if answers took no time.

    Of a request that another follows the output is stored too, since the next prompt begins with it; its tokens
    are like those of no other. Other outputs are left out: nobody would look them up.
    """
    reader = _Reader(block_size)
    for request in requests:
        reader.add(request)
    return reader.traffic()


class _Reader:
    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[bytes, int] = {}  # of contents, by their keys
        self._sequences: dict[str, _Sequence] = {}
        self._prompt_tokens = self._outputs = 0  # tokens so far

    def add(self, request: Request) -> None:
        """The next request; one that another follows comes before that."""
        before = None if request.follows is None else self._sequences[request.follows]
        prompt = request.prompt_token_ids
        parts = None if before is not None else self._parts(prompt)
        whole = 0 if parts is None else len(parts) * self._size
        own = np.asarray(prompt[whole:], dtype=np.int64)
        sequence = _Sequence((request.arrival_s, 0), request.follows, request.expected_tokens, own)
        sequence.key = blake2b(repr(request.salt).encode(), digest_size=16).digest()
        if before is not None:
            self._store_output(before)
            sequence.place = (before.place[0] + request.arrival_s, before.place[1] + 1)
            sequence.key, sequence.contents = before.key, before.contents.copy()
            sequence.rest = np.concatenate([before.rest, own])
        self._store(sequence, parts or [])
        self._cut(sequence)
        sequence.looked_up = len(sequence.contents)
        sequence.stored = len(sequence.contents) * self._size + len(sequence.rest)
        self._prompt_tokens += sequence.stored
        self._sequences[request.request_id] = sequence

    def traffic(self) -> Traffic:
        """All that was added."""
        visits: dict[str, Visit] = {}
        for name, sequence in sorted(self._sequences.items(), key=lambda item: item[1].place):
            full, rest = divmod(sequence.stored, self._size)
            contents = np.array(sequence.contents[:full], dtype=np.int64)
            follows = None if sequence.follows is None else visits[sequence.follows]
            visits[name] = Visit(contents, sequence.looked_up, rest > 0, follows)
        ordered, count = list(visits.values()), len(self._numbers)
        return Traffic(ordered, self._size, self._prompt_tokens, count, _look_ahead(ordered, count))

    def _store_output(self, sequence: _Sequence) -> None:
        """The output of a request that another follows; the last of its tokens is computed by the next turn."""
        if sequence.output:
            new = -1 - np.arange(self._outputs, self._outputs + sequence.output)
            self._outputs += sequence.output
            sequence.rest = np.concatenate([sequence.rest, new])
            sequence.stored += sequence.output - 1
            sequence.output = 0
            self._cut(sequence)

    def _cut(self, sequence: _Sequence) -> None:
        """Make contents of the whole blocks of the rest."""
        tokens, size = sequence.rest, self._size
        whole = len(tokens) // size * size
        packed = tokens[:whole].tobytes()
        self._store(sequence, [packed[start : start + 8 * size] for start in range(0, len(packed), 8 * size)])
        sequence.rest = tokens[whole:].copy()

    def _store(self, sequence: _Sequence, parts: list[bytes]) -> None:
        """Make a content of each part, behind those before it."""
        for part in parts:
            sequence.key = blake2b(part, digest_size=16, key=sequence.key).digest()
            sequence.contents.append(self._numbers.setdefault(sequence.key, len(self._numbers)))

    def _parts(self, prompt: TokenIds) -> list[bytes] | None:
        """What stands for each whole block of a prompt that is known by ids: the id, and which part of its block.
        None where blocks are cut elsewhere, or too short for their tokens to tell ids apart.
        """
        size = self._size
        if not isinstance(prompt, HashedPrompt) or prompt.block_tokens % size or size < 2 * prompt.places:
            return None
        per_id, ids, made = prompt.block_tokens // size, prompt.ids, (prompt.vocab_size, prompt.key)
        return [pack("QqqQ", ids[block // per_id], block % per_id, *made) for block in range(len(prompt) // size)]


def _look_ahead(visits: list[Visit], contents: int) -> int:
    """Note the next uses; returns the blocks that would be found if none were ever evicted."""
    following = np.full(contents, NEVER)
    for index in range(len(visits) - 1, -1, -1):
        visit = visits[index]
        visit.next_uses = following[visit.contents]
        following[visit.contents[: visit.looked_up]] = index
    known, hits = np.zeros(contents, dtype=np.bool_), 0
    for visit in visits:
        hits += int(np.logical_and.accumulate(known[visit.contents[: visit.looked_up]]).sum())
        known[visit.contents] = True
    return hits
