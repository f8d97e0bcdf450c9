"""The timed traces of `vllm bench serve --dataset-name timed_trace`: timestamp in seconds, input_length,
output_length, hash_ids (docs.vllm.ai, Benchmark CLI). Alibaba's Bailian traces have this form too.
"""

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.traces import Row, json_rows, trace_source


@trace_source("timed_trace")
def timed_rows(config: WorkloadConfig, least: int = 1) -> Iterator[Row]:
    """The rows of a file of JSON lines, with `least` tokens. Prompts with equal ids, one for each block of
    `workload.block_tokens` (vLLM's --timed-trace-chunk-hash-size), begin with equal tokens.
    """
    return json_rows(config, least, unit_s=1.0)
