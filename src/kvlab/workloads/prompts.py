"""Prompts of random tokens, and what the requests of a workload have in common."""

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.hashed_prompt import TokenIds

MAX_PROMPT_TOKENS = 10_000_000  # beyond any model; a typing error must not fill the memory


def random_prompt(generator: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` token ids, uniform over the vocabulary."""
    return tuple(generator.integers(0, vocab_size, length).tolist())


def make_request(
    index: int,
    prompt: TokenIds,
    output_tokens: int,
    arrival_s: float,
    config: WorkloadConfig,
    seed: int,
    *,
    follows: str | None = None,
    priority: int = 0,
    salt: int | None = None,
    pin_tokens: int = 0,
    most: int | None = None,
) -> Request:
    """The workload's request number `index`, with a sampling seed of its own. It asks for `workload.max_tokens`,
    or for `most`, and without either for the `output_tokens` that it produces.
    """
    most = config.max_tokens or most
    sampling = SamplingParams(
        max_tokens=most or output_tokens,
        temperature=config.temperature,
        seed=seed * 1_000_000 + index,
        ignore_eos=config.ignore_eos,
        n=config.samples,
    )
    return Request(
        f"r{index}",
        prompt,
        sampling,
        arrival_s,
        salt,
        follows=follows,
        priority=priority,
        pin_tokens=pin_tokens,
        output_tokens=None if most is None else output_tokens,
    )


def grown_lengths(requests: list[Request]) -> dict[str, int]:
    """The tokens each request's sequence grows to, all earlier turns of its conversation included."""
    lengths: dict[str, int] = {}
    for request in requests:
        earlier = lengths[request.follows] if request.follows is not None else 0
        lengths[request.request_id] = earlier + len(request.prompt_token_ids) + request.expected_tokens
    return lengths
