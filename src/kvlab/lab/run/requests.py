"""The requests of a run's configuration, and how long their sequences grow."""

from collections.abc import Iterable
from functools import cache, partial

from kvlab.config import RunConfig
from kvlab.core import Request
from kvlab.errors import WorkloadError, shown
from kvlab.lab.machine import available_memory
from kvlab.models.families import decoder_config
from kvlab.models.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from kvlab.models.word_tokenizer import word_tokenizer
from kvlab.workloads import build_requests
from kvlab.workloads.prompts import grown_lengths


def requests_of(config: RunConfig) -> list[Request]:
    """See `build_requests`: within this machine's memory, of the model's tokens. On simulated devices kvlab's
    own tokenizer stands in for one that the model does not have. Raises a KvlabError.
    """
    vocab_size = decoder_config(config.model, simulated=True).vocab_size
    return build_requests(
        config.workload,
        vocab_size=vocab_size,
        seed=config.seed,
        memory=available_memory("cpu"),
        tokenizer=cache(partial(_tokenizer, config, vocab_size)),
    )


def _tokenizer(config: RunConfig, vocab_size: int) -> Tokenizer:
    """Raises TokenizerError."""
    found = find_tokenizer(config.model)
    if found is None and config.executor.kind == "simulated":
        found = word_tokenizer(vocab_size)
    return found or load_tokenizer(config.model)


def lengths_note(config: RunConfig, requests: Iterable[Request]) -> str | None:
    """Whose tokens the lengths of prompts are in, where that is not a tokenizer of the model's or lent to it."""
    if config.executor.kind != "simulated" or all(request.prompt is None for request in requests):
        return None
    if find_tokenizer(config.model) is not None:
        return None
    text = (
        f"prompts have the lengths that kvlab's own tokenizer gives them: model.name={shown(config.model.name)} has"
    )
    return f"{text} none here, and its own gives others; model.tokenizer=WHERE lends it one, as fetched:smollm2"


def check_lengths(requests: list[Request], workload: str, limit: int, positions: int) -> int:
    """The longest sequence the requests can make. Raises WorkloadError if that is longer than the `limit`, which
    can be as many as the model has `positions`.
    """
    lengths = grown_lengths(requests)
    longest = max(requests, key=lambda request: lengths[request.request_id])
    length = lengths[longest.request_id]
    if length > limit:
        earlier = length - len(longest.prompt_token_ids) - longest.expected_tokens
        behind = f"behind {earlier} tokens of earlier turns " if earlier else ""
        advice = f"model.max_seq_len={length} would take it"
        if length > positions:
            advice = f"the model has positions up to {positions}: leave the request out, or take another model"
        raise WorkloadError(
            f"workload.name={workload}: request {longest.request_id} {behind}has a prompt of "
            f"{len(longest.prompt_token_ids)} tokens and up to {longest.expected_tokens} output tokens, "
            f"more than model.max_seq_len={limit}; {advice}"
        )
    return length
