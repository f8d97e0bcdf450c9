"""Microsoft Azure's traces of LLM inference, 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens
(github.com/Azure/AzurePublicDataset; Patel et al., Splitwise, ISCA 2024).
"""

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.traces import Row, csv_rows, moment, trace_source


@trace_source("azure")
def azure_rows(config: WorkloadConfig, least: int = 1) -> Iterator[Row]:
    """The rows of a CSV file, each with a prompt of its own. Prompts and outputs have `least` tokens."""
    time = "a date and time such as 2023-11-16 18:15:46.6805900"
    return csv_rows(config, time, moment, least=least, least_output=least)
