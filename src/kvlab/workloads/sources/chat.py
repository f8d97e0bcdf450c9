"""Conversations in English that come with kvlab, under one system prompt: for a model with a chat template."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Message, Request
from kvlab.workloads.arrivals import arrival_times
from kvlab.workloads.prompts import make_request
from kvlab.workloads.sources import WORKLOAD_SOURCES

_FILE = Path(__file__).parent.parent / "chat.jsonl"


@WORKLOAD_SOURCES.register("chat")
def chat(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """`workload.num_requests` of the conversations, the first again behind the last. Each asks for an answer of up
    to `workload.output_len.max` tokens; `system_len` and other lengths of prompts do not apply.
    """
    arrivals, conversations = arrival_times(config, np.random.default_rng(seed)), _conversations()
    for index, arrival_s in enumerate(islice(arrivals, config.num_requests)):
        request = make_request(index, (), config.output_len.max, arrival_s, config, seed)
        yield replace(request, prompt=conversations[index % len(conversations)])


@cache
def _conversations() -> list[tuple[Message, ...]]:
    """The first line of the file is the system prompt; each other one holds the messages of a conversation."""
    system, *rows = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return [(Message(**system), *(Message(**message) for message in row)) for row in rows]
