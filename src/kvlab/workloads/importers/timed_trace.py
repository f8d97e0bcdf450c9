"""The timed traces of vLLM, and Alibaba's."""

from __future__ import annotations

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.mooncake import MooncakeImporter


@IMPORTERS.register("timed_trace")
class TimedTraceImporter(MooncakeImporter):
    """See `kvlab.workloads.sources.timed_trace`."""

    what, source, block_tokens = "a timed trace of vLLM", "timed_trace", 16
    unit_s = 1.0

    @staticmethod
    def recognises(head: str) -> bool:
        line = head.partition("\n")[0]
        return '"hash_ids"' in line and '"chat_id"' in line
