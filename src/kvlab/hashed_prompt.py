"""Prompts that are known by the ids of their blocks, and made into tokens where something reads them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvlab.splitmix import STEP, mix

_MOST_SHARED = 2**20  # token ids whose Python numbers all prompts share: 8 bytes a token in a list instead of 40


@dataclass(frozen=True, slots=True)
class HashedPrompt(Sequence[int]):
    """`length` token ids that depend on the ids of their blocks and on `key` alone, each block of `block_tokens`.
    A slice makes the tokens of its blocks; nothing is kept.

    Blocks of different ids below 2 ** 64 differ, if they have the tokens to write one down: 4 in a vocabulary of
    150,000. A block's tokens are the digits, to the base of the vocabulary, of numbers that its id is mixed into
    (the finalizer of SplitMix64, which is a bijection; Steele et al., 2014).
    """

    ids: Sequence[int]
    block_tokens: int
    length: int
    vocab_size: int
    key: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if not isinstance(index, slice):
            return self._python(range(self.length)[index], 1)[0]
        start, stop, step = index.indices(self.length)
        if step < 0:
            return tuple(self.tolist()[index])
        return tuple(self._python(start, max(stop - start, 0))[::step])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        tokens = self.tokens(0, self.length)
        return tokens if dtype is None else tokens.astype(dtype, copy=False)

    @property
    def places(self) -> int:
        """Tokens that tell ids apart."""
        return 1 if self.vocab_size == 1 else math.ceil(64 / math.log2(self.vocab_size))

    def tolist(self) -> list[int]:
        """All tokens, in a list of their own."""
        return self._python(0, self.length)

    def to_array(self) -> array[int]:
        """All tokens, in an array of their own: no Python number is made, and they are packed as they are."""
        found = array("q")
        found.frombytes(self.tokens(0, self.length).view(np.uint8).data)
        return found

    def tokens(self, start: int, count: int) -> NDArray[np.int64]:
        """`[count]` token ids from the token `start` on."""
        first, last = start // self.block_tokens, -(-(start + count) // self.block_tokens)
        places = self.places
        mixed = mix((np.array(self.ids[first:last], dtype=np.uint64) ^ np.uint64(self.key)) + STEP)
        groups = np.arange(-(-self.block_tokens // places), dtype=np.uint64)
        numbers, base = mix(mixed[:, None] + groups + STEP), np.uint64(self.vocab_size)
        digits = np.empty((*numbers.shape, places), dtype=np.int64)
        for place in range(places):
            above = numbers // base
            digits[..., place] = numbers - above * base
            numbers = above
        flat = digits.reshape(last - first, groups.size * places)[:, : self.block_tokens].reshape(-1)
        return flat[start - first * self.block_tokens :][:count]

    def _python(self, start: int, count: int) -> list[int]:
        tokens = self.tokens(start, count)
        found: list[int] = (tokens if self.vocab_size > _MOST_SHARED else _shared(self.vocab_size)[tokens]).tolist()
        return found


TokenIds = tuple[int, ...] | HashedPrompt  # a prompt
TokenList = MutableSequence[int]  # a prompt and what comes behind it: a list, or an array of 64-bit integers


@lru_cache(maxsize=2)
def _shared(size: int) -> NDArray[np.object_]:
    """The Python numbers below `size`."""
    return np.array(range(size), dtype=np.object_)
