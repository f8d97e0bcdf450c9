"""Lengths of ShareGPT's conversations: num_prefill_tokens, num_decode_tokens, and no times
(github.com/microsoft/sarathi-serve; Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.sources import WORKLOAD_SOURCES
from kvlab.workloads.traces import csv_rows, trace_requests


@WORKLOAD_SOURCES.register("sharegpt_lengths")
def read_sharegpt_lengths(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of the CSV file `workload.path`, each with a prompt of its own, arriving as `workload.arrival`
    says. Raises WorkloadError.
    """
    return trace_requests(csv_rows(config), config, vocab_size=vocab_size, seed=seed)
