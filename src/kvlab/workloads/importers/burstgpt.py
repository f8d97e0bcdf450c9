"""BurstGPT's traces."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.burstgpt import burstgpt_rows
from kvlab.workloads.traces import Row


@IMPORTERS.register("burstgpt")
class BurstGPTImporter(RowImporter):
    """See `kvlab.workloads.sources.burstgpt`."""

    what, source, unknown = "BurstGPT's trace", "burstgpt", ("prefixes",)

    @staticmethod
    def recognises(head: str) -> bool:
        return "Request tokens" in head.partition("\n")[0]

    def rows(self, config: WorkloadConfig) -> Iterator[Row]:
        return burstgpt_rows(config)
