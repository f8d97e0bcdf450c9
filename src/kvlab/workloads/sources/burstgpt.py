"""BurstGPT, traces of a campus's ChatGPT and GPT-4: Timestamp in seconds, Request tokens, Response tokens, and more
(github.com/HPMLL/BurstGPT; Wang et al., KDD 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.sources import WORKLOAD_SOURCES
from kvlab.workloads.traces import Row, csv_rows, trace_requests


@WORKLOAD_SOURCES.register("burstgpt")
def read_burstgpt(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of the CSV file `workload.path`, each with a prompt of its own. Those with 0 response tokens
    failed when they were recorded, and are left out. Raises WorkloadError.
    """
    return trace_requests(burstgpt_rows(config), config, vocab_size=vocab_size, seed=seed)


def burstgpt_rows(config: WorkloadConfig, least: int = 1) -> Iterator[Row]:
    """The rows of the file, whose prompts have `least` tokens."""
    return csv_rows(config, "a number of seconds", least=least, least_output=0)
