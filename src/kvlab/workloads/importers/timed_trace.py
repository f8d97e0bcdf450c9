"""The timed traces of vLLM, and Alibaba's."""

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.timed_trace import timed_rows


@IMPORTERS.register("timed_trace")
class TimedTraceImporter(RowImporter):
    """See `kvlab.workloads.sources.timed_trace`."""

    what, source, block_tokens = "a timed trace of vLLM", "timed_trace", 16
    marks = ('"hash_ids"', '"chat_id"')
    rows = staticmethod(timed_rows)
