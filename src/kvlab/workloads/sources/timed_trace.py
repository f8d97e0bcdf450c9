"""The timed traces of `vllm bench serve --dataset-name timed_trace`: timestamp in seconds, input_length,
output_length, hash_ids (docs.vllm.ai, Benchmark CLI). Alibaba's Bailian traces have this form too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.sources import WORKLOAD_SOURCES
from kvlab.workloads.traces import json_rows, trace_requests


@WORKLOAD_SOURCES.register("timed_trace")
def read_timed_trace(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of the file of JSON lines `workload.path`. Prompts with equal ids, one for each block of
    `workload.block_tokens` (vLLM's --timed-trace-chunk-hash-size), begin with equal tokens. Raises WorkloadError.
    """
    return trace_requests(json_rows(config, unit_s=1.0), config, vocab_size=vocab_size, seed=seed)
