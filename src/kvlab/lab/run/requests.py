"""The requests of a run's configuration."""

from __future__ import annotations

from functools import partial

from kvlab.config import RunConfig
from kvlab.core import Request
from kvlab.lab.machine import available_memory
from kvlab.models.families import decoder_config
from kvlab.models.tokenizer import load_tokenizer
from kvlab.workloads import build_requests


def requests_of(config: RunConfig) -> list[Request]:
    """See `build_requests`: within this machine's memory, of the model's tokens. Raises a KvlabError."""
    return build_requests(
        config.workload,
        vocab_size=decoder_config(config.model, simulated=True).vocab_size,
        seed=config.seed,
        memory=available_memory("cpu"),
        tokenizer=partial(load_tokenizer, config.model),
    )
