"""Microsoft Azure's traces of LLM inference."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.azure import azure_rows
from kvlab.workloads.traces import Row


@IMPORTERS.register("azure")
class AzureImporter(RowImporter):
    """See `kvlab.workloads.sources.azure`."""

    what, source, unknown = "Azure's trace of LLM inference", "azure", ("prefixes",)

    @staticmethod
    def recognises(head: str) -> bool:
        return "ContextTokens" in head.partition("\n")[0]

    def rows(self, config: WorkloadConfig) -> Iterator[Row]:
        return azure_rows(config)
