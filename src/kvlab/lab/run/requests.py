"""The requests of a run's configuration, and how long their sequences grow."""

from functools import partial

from kvlab.config import RunConfig
from kvlab.core import Request
from kvlab.errors import WorkloadError
from kvlab.lab.machine import available_memory
from kvlab.models.families import decoder_config
from kvlab.models.tokenizer import load_tokenizer
from kvlab.workloads import build_requests
from kvlab.workloads.prompts import grown_lengths


def requests_of(config: RunConfig) -> list[Request]:
    """See `build_requests`: within this machine's memory, of the model's tokens. Raises a KvlabError."""
    return build_requests(
        config.workload,
        vocab_size=decoder_config(config.model, simulated=True).vocab_size,
        seed=config.seed,
        memory=available_memory("cpu"),
        tokenizer=partial(load_tokenizer, config.model),
    )


def check_lengths(requests: list[Request], workload: str, limit: int) -> int:
    """The longest sequence the requests can make. Raises WorkloadError if that is longer than the `limit`."""
    lengths = grown_lengths(requests)
    longest = max(requests, key=lambda request: lengths[request.request_id])
    length = lengths[longest.request_id]
    if length > limit:
        earlier = length - longest.max_total_tokens
        behind = f"behind {earlier} tokens of earlier turns " if earlier else ""
        raise WorkloadError(
            f"workload.name={workload}: request {longest.request_id} {behind}has a prompt of "
            f"{len(longest.prompt_token_ids)} tokens and up to {longest.sampling.max_tokens} output tokens, "
            f"more than model.max_seq_len={limit}; model.max_seq_len={length} would take it"
        )
    return length
