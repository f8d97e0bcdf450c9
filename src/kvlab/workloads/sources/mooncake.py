"""Mooncake's traces of Kimi: timestamp in milliseconds, input_length, output_length, hash_ids
(github.com/kvcache-ai/Mooncake; Qin et al., FAST 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.sources import WORKLOAD_SOURCES
from kvlab.workloads.traces import json_rows, trace_requests


@WORKLOAD_SOURCES.register("mooncake")
def read_mooncake(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of the file of JSON lines `workload.path`. An id stands for a block of 512 tokens and all before
    it: prompts with equal ids begin with equal tokens. Raises WorkloadError.
    """
    return trace_requests(json_rows(config, unit_s=1e-3), config, vocab_size=vocab_size, seed=seed)
