"""Requests drawn from an arrival process, length distributions, and what prompts have in common."""

from __future__ import annotations

import numpy as np

from kvlab.config import LengthConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.prompts import make_request, random_prompt


def synthesize(config: WorkloadConfig, *, vocab_size: int, seed: int) -> list[Request]:
    """`num_requests` requests, or conversations of `turns` requests, with uniform lengths and random tokens.

    A prompt is [system | group | own]: tokens that all share, tokens that its group shares, tokens of its own.
    Arrivals: `burst`, all at 0; `uniform`, one every 1 / rate seconds from 0 on. A conversation's later turns
    follow the one before after `think_s`, and have tokens of their own alone.
    """
    # Lengths, groups and tokens have generators of their own: another vocabulary leaves the others as they are.
    lengths, tokens, choices = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    system = random_prompt(tokens, config.system_len, vocab_size)
    groups = [random_prompt(tokens, config.group_len, vocab_size) for _ in range(config.num_groups)]
    popularity = 1.0 / np.arange(1, config.num_groups + 1) ** config.zipf
    requests: list[Request] = []
    for number in range(config.num_requests):
        group = groups[int(choices.choice(config.num_groups, p=popularity / popularity.sum()))]
        arrival_s = number / config.rate if config.arrival == "uniform" and config.rate else 0.0
        for turn in range(config.turns):
            prompt_len, output_len = _draw(lengths, config.prompt_len), _draw(lengths, config.output_len)
            own = random_prompt(tokens, prompt_len, vocab_size)
            request = make_request(
                len(requests),
                own if turn else system + group + own,
                output_len,
                config.think_s if turn else arrival_s,
                config,
                seed,
                follows=requests[-1].request_id if turn else None,
            )
            requests.append(request)
    return requests


def _draw(generator: np.random.Generator, length: LengthConfig) -> int:
    return int(generator.integers(length.min, length.max, endpoint=True))
