"""BurstGPT's traces."""

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.burstgpt import burstgpt_rows


@IMPORTERS.register("burstgpt")
class BurstGPTImporter(RowImporter):
    """See `kvlab.workloads.sources.burstgpt`."""

    what, source, unknown = "BurstGPT's trace", "burstgpt", ("prefixes",)
    marks = ("Request tokens",)
    rows = staticmethod(burstgpt_rows)
