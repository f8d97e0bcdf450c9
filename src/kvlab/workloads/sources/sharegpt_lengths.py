"""Lengths of ShareGPT's conversations: num_prefill_tokens, num_decode_tokens, and no times
(github.com/microsoft/sarathi-serve; Agrawal et al., OSDI 2024).
"""

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.traces import Row, csv_rows, trace_source


@trace_source("sharegpt_lengths")
def sharegpt_rows(config: WorkloadConfig) -> Iterator[Row]:
    """The rows of a CSV file, each with a prompt of its own, arriving as `workload.arrival` says."""
    return csv_rows(config)
