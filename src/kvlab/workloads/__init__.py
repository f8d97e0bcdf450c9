"""The requests of a run: drawn from distributions, read from a file, or from a source that a plugin adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlab.config import LengthConfig, WorkloadConfig, format_bytes
from kvlab.core import Request
from kvlab.engine.validation import check_pin
from kvlab.errors import CapacityError, KvlabError, WorkloadError, shown
from kvlab.hashed_prompt import HashedPrompt
from kvlab.workloads.source_check import SourceCheck
from kvlab.workloads.sources import WORKLOAD_SOURCES

if TYPE_CHECKING:
    from kvlab.models.tokenizer import Tokenizer

_REQUEST_BYTES = 1400  # measured: a request, and its sequence in an engine
_TOKEN_BYTES = 48  # of a prompt: a number, and its places in request and sequence; of a hashed one, for each id
_SHARED_TOKEN_BYTES = 16  # the places alone


def build_requests(
    config: WorkloadConfig,
    *,
    vocab_size: int,
    seed: int,
    memory: int | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> list[Request]:
    """The workload's requests: those that follow no other by arrival, then those that do, each behind the one it
    follows. The same seed gives the same requests. Text becomes tokens with the `tokenizer`, which is asked for
    where there is text.

    Raises WorkloadError for a file that cannot be read, naming the line; TokenizerError for text that cannot be
    encoded; CapacityError, before they are made where that is known, for requests that take more than `memory`
    bytes.
    """
    if memory is not None and config.path is None:
        _check_settings(config, memory)
        memory = None  # checked
    requests: list[Request] = []
    used = 0
    made: object = WORKLOAD_SOURCES.get(config.source)(config, vocab_size=vocab_size, seed=seed)
    if not isinstance(made, Iterable):
        raise WorkloadError(f"workload.source={config.source}: has to return requests, not {shown(made, repr)}")
    source, check = iter(made), SourceCheck(config.source)
    for request in source:
        check.add(request)
        try:
            request = _with_tokens(request, tokenizer)
        except KvlabError as error:
            if isinstance(source, Generator):
                source.throw(error)  # it knows which line the request is from
            raise
        prompt = request.prompt_token_ids
        kept = len(prompt.ids) if isinstance(prompt, HashedPrompt) else len(prompt)
        used += _REQUEST_BYTES + _TOKEN_BYTES * kept
        if memory is not None and used > memory:
            raise CapacityError(
                f"workload.name={config.name}: with request {len(requests) + 1} the requests take more than the "
                f"{format_bytes(memory)} that are available; the {len(requests)} before it would fit"
            )
        requests.append(request)
    if not requests:
        raise WorkloadError(f"workload.source={config.source}: has no request")
    first = [request for request in requests if request.follows is None]
    later = [request for request in requests if request.follows is not None]
    return sorted(first, key=lambda request: request.arrival_s) + later


def _with_tokens(request: Request, tokenizer: Callable[[], Tokenizer] | None) -> Request:
    """The request with the tokens of its text, if it has none yet. Raises WorkloadError, TokenizerError, or
    RequestRefusedError for a pin of more tokens than that.
    """
    prompt = None if request.prompt_token_ids else request.prompt
    if prompt is not None or request.sampling.stop:
        if tokenizer is None:
            raise WorkloadError("the request needs text, and there is no tokenizer here")
        encoder = tokenizer()
        if prompt is not None:
            request = replace(request, prompt_token_ids=tuple(encoder.encode_prompt(prompt)))
    if request.pin_tokens:
        check_pin(request)
    return request


def _check_settings(config: WorkloadConfig, memory: int) -> None:
    """Raise CapacityError for settings whose requests will take more than `memory` bytes."""
    own, shared = config.turns * _mean(config.prompt_len), config.system_len + config.group_len
    size = config.turns * _REQUEST_BYTES + _TOKEN_BYTES * own + _SHARED_TOKEN_BYTES * shared
    common = _TOKEN_BYTES * (config.system_len + config.num_groups * (config.group_len + 1))
    needed, fitting = common + config.num_requests * size, int((memory - common) // size)
    if needed > memory:
        advice = f"workload.num_requests={fitting} would fit"
        if fitting < 1:
            advice = "not one of them fits: take shorter prompts, fewer groups or fewer turns"
        raise CapacityError(
            f"workload.num_requests={config.num_requests}: these requests would take {format_bytes(needed)} and "
            f"{format_bytes(memory)} are available; {advice}"
        )


def _mean(length: LengthConfig) -> float:
    """About the mean length, in tokens."""
    if length.distribution == "lognormal" and length.median:
        return max(length.min, min(length.max, length.median * math.exp(length.sigma**2 / 2)))
    return (length.min + length.max) / 2


def may_sample(config: WorkloadConfig) -> bool:
    """Whether any of the workload's requests may sample its tokens. Drawn requests all have `workload.temperature`;
    those of another source may have a temperature of their own.
    """
    return config.temperature > 0 or WORKLOAD_SOURCES.get(config.source) is not WORKLOAD_SOURCES.get("synthetic")
