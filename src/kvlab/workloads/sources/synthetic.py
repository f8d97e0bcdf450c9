"""Requests drawn from an arrival process, length distributions, and what prompts have in common."""

from collections.abc import Iterator

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.arrivals import arrival_times
from kvlab.workloads.lengths import draw_length
from kvlab.workloads.prompts import make_request, random_prompt
from kvlab.workloads.sources import WORKLOAD_SOURCES


@WORKLOAD_SOURCES.register("synthetic")
def synthesize(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """`num_requests` requests, or conversations of `turns` requests, with random lengths and tokens.

    A prompt is [system | group | own]: tokens that all share, tokens that its group shares, tokens of its own. A
    conversation's later turns follow the one before after `think_s`, and have tokens of their own alone.
    """
    # Lengths, groups and tokens have generators of their own: another vocabulary leaves the others as they are.
    children = np.random.SeedSequence(seed).spawn(5)
    lengths, tokens, choices, gaps, ranks = (np.random.default_rng(child) for child in children)
    arrivals = arrival_times(config, gaps)
    system = random_prompt(tokens, config.system_len, vocab_size)
    groups = [random_prompt(tokens, config.group_len, vocab_size) for _ in range(config.num_groups)]
    popularity = 1.0 / np.arange(1, config.num_groups + 1) ** config.zipf
    made = 0
    for _ in range(config.num_requests):
        priority = int(ranks.integers(config.priorities))
        arrival_s = next(arrivals)
        group = int(choices.choice(config.num_groups, p=popularity / popularity.sum()))
        for turn in range(config.turns):
            prompt_len, output_len = (
                draw_length(lengths, config.prompt_len),
                draw_length(lengths, config.output_len),
            )
            own = random_prompt(tokens, prompt_len, vocab_size)
            yield make_request(
                made,
                own if turn else system + groups[group] + own,
                output_len,
                config.think_s if turn else arrival_s,
                config,
                seed,
                follows=f"r{made - 1}" if turn else None,
                priority=priority,
                salt=group if config.salt_groups else None,
                pin_tokens=config.system_len + config.group_len if config.pin_prefix else 0,
            )
            made += 1
