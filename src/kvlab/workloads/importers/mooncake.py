"""Mooncake's traces."""

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.mooncake import mooncake_rows


@IMPORTERS.register("mooncake")
class MooncakeImporter(RowImporter):
    """See `kvlab.workloads.sources.mooncake`."""

    what, source, block_tokens = "Mooncake's trace", "mooncake", 512
    marks = ('"hash_ids"', '"input_length"')
    rows = staticmethod(mooncake_rows)

    @classmethod
    def recognises(cls, head: str) -> bool:
        """Not vLLM's, which have the same fields and more."""
        return super().recognises(head) and '"chat_id"' not in head.partition("\n")[0]
