"""Prompts of random tokens, and what the requests of a workload have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams

MAX_PROMPT_TOKENS = 10_000_000  # beyond any model; a typing error must not fill the memory


def random_prompt(generator: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` token ids, uniform over the vocabulary."""
    return tuple(generator.integers(0, vocab_size, length).tolist())


def hashed_prompt(
    ids: Sequence[int], block_tokens: int, length: int, *, vocab_size: int, key: int
) -> tuple[int, ...]:
    """`length` token ids that depend on the ids of their blocks and on `key` alone, each block of `block_tokens`.

    Blocks of different ids below 2 ** 64 differ, if they have the tokens to write one down: 4 in a vocabulary of
    150,000. A block's tokens are the digits, to the base of the vocabulary, of numbers that its id is mixed into
    (the finalizer of SplitMix64, which is a bijection; Steele et al., 2014).
    """
    places = 1 if vocab_size == 1 else math.ceil(64 / math.log2(vocab_size))  # digits that tell all ids apart
    where = np.arange(length, dtype=np.uint64)
    offset = where % np.uint64(block_tokens)
    mixed = _mix(np.array(ids, dtype=np.uint64) ^ np.uint64(key))[where // np.uint64(block_tokens)]
    numbers = _mix(mixed + offset // np.uint64(places))
    powers = np.array([vocab_size**place % 2**64 for place in range(places)], dtype=np.uint64)
    tokens: list[int] = (numbers // powers[offset % np.uint64(places)] % np.uint64(vocab_size)).tolist()
    return tuple(tokens)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: 64 bits to 64 bits, each result from one number alone."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def make_request(
    index: int,
    prompt: tuple[int, ...],
    max_tokens: int,
    arrival_s: float,
    config: WorkloadConfig,
    seed: int,
    *,
    follows: str | None = None,
    priority: int = 0,
) -> Request:
    """The workload's request number `index`, with a sampling seed of its own."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=config.temperature,
        seed=seed * 1_000_000 + index,
        ignore_eos=config.ignore_eos,
        n=config.samples,
    )
    return Request(f"r{index}", prompt, sampling, arrival_s, follows=follows, priority=priority)


def grown_lengths(requests: list[Request]) -> dict[str, int]:
    """The most tokens each request's sequence can grow to, all earlier turns of its conversation included."""
    lengths: dict[str, int] = {}
    for request in requests:
        earlier = lengths[request.follows] if request.follows is not None else 0
        lengths[request.request_id] = earlier + request.max_total_tokens
    return lengths
