"""Mooncake's traces of Kimi: timestamp in milliseconds, input_length, output_length, hash_ids
(github.com/kvcache-ai/Mooncake; Qin et al., FAST 2025).
"""

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.traces import Row, json_rows, trace_source


@trace_source("mooncake")
def mooncake_rows(config: WorkloadConfig, least: int = 1) -> Iterator[Row]:
    """The rows of a file of JSON lines, with `least` tokens. An id stands for a block of 512 tokens and all before
    it: prompts with equal ids begin with equal tokens.
    """
    return json_rows(config, least, unit_s=1e-3)
