"""Prompts of random tokens, and what the requests of a workload have in common."""

from __future__ import annotations

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams


def random_prompt(generator: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` token ids, uniform over the vocabulary."""
    return tuple(generator.integers(0, vocab_size, length).tolist())


def make_request(
    index: int,
    prompt: tuple[int, ...],
    max_tokens: int,
    arrival_s: float,
    config: WorkloadConfig,
    seed: int,
) -> Request:
    """The workload's request number `index`, with a sampling seed of its own."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=config.temperature,
        seed=seed * 1_000_000 + index,
        ignore_eos=config.ignore_eos,
    )
    return Request(f"r{index}", prompt, sampling, arrival_s)
