"""Mooncake's traces."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.config import WorkloadConfig
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.traces import Row, json_rows


@IMPORTERS.register("mooncake")
class MooncakeImporter(RowImporter):
    """See `kvlab.workloads.sources.mooncake`."""

    what, source, block_tokens = "Mooncake's trace", "mooncake", 512
    unit_s = 1e-3

    @staticmethod
    def recognises(head: str) -> bool:
        line = head.partition("\n")[0]
        return '"hash_ids"' in line and '"chat_id"' not in line and '"input_length"' in line

    def rows(self, config: WorkloadConfig) -> Iterator[Row]:
        return json_rows(config, self.unit_s)
