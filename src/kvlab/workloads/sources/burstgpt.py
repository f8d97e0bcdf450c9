"""BurstGPT, traces of a campus's ChatGPT and GPT-4: Timestamp in seconds, Request tokens, Response tokens, and more
(github.com/HPMLL/BurstGPT; Wang et al., KDD 2025).
"""

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.traces import Row, csv_rows, trace_source


@trace_source("burstgpt")
def burstgpt_rows(config: WorkloadConfig, least: int = 1) -> Iterator[Row]:
    """The rows of a CSV file, each with a prompt of its own, which has `least` tokens. Those with 0 response tokens
    failed when they were recorded: no request is made of them.
    """
    return csv_rows(config, "a number of seconds", least=least, least_output=0)
