"""Requests drawn from an arrival process and length distributions."""

from __future__ import annotations

import numpy as np

from kvlab.config import LengthConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.prompts import make_request, random_prompt


def synthesize(config: WorkloadConfig, *, vocab_size: int, seed: int) -> list[Request]:
    """`num_requests` requests with uniform lengths and random prompts.

    Arrivals: `burst`, all at 0; `uniform`, one every 1 / rate seconds from 0 on.
    """
    # Lengths and prompts have generators of their own: another vocabulary leaves the lengths as they are.
    lengths, tokens = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    requests = []
    for index in range(config.num_requests):
        prompt_len, output_len = _draw(lengths, config.prompt_len), _draw(lengths, config.output_len)
        arrival_s = index / config.rate if config.arrival == "uniform" and config.rate else 0.0
        prompt = random_prompt(tokens, prompt_len, vocab_size)
        requests.append(make_request(index, prompt, output_len, arrival_s, config, seed))
    return requests


def _draw(generator: np.random.Generator, length: LengthConfig) -> int:
    return int(generator.integers(length.min, length.max, endpoint=True))
